"""The form of API keys: a key shows by itself that it is mistyped or made up. Pure."""

import base64
import enum
import re
import zlib
from typing import Final

START: Final = "nsk-"
"""Begins keys with a checksum. Older ones begin with `ns-` and have none."""

_RANDOM: Final = "[A-Za-z0-9_-]{43}"
"""32 bytes as Base64 for URLs."""
_CHECKED: Final = re.compile(f"{START}{_RANDOM}[A-Za-z0-9_-]{{6}}")
_OLD: Final = re.compile(f"ns-{_RANDOM}")
_CHECKSUM_CHARACTERS: Final = 6


class Form(enum.Enum):
    """What a text can be, judged by itself."""

    CHECKED = enum.auto()
    """A key whose checksum fits."""
    OLD = enum.auto()
    """A key of the form that was made before keys had a checksum."""
    MALFORMED = enum.auto()
    """No key that was ever made."""


def new_key(random: bytes) -> str:
    """Return a key made of 32 random bytes."""
    body = START + base64.urlsafe_b64encode(random).decode().rstrip("=")
    return body + _checksum(body)


def form_of(key: str) -> Form:
    """Return the form of what is shown as a key."""
    if _CHECKED.fullmatch(key):
        body = key[:-_CHECKSUM_CHARACTERS]
        return Form.CHECKED if key == body + _checksum(body) else Form.MALFORMED
    return Form.OLD if _OLD.fullmatch(key) else Form.MALFORMED


def _checksum(body: str) -> str:
    # Against typing errors and made-up keys, not against forgers: the store knows the good ones.
    crc = zlib.crc32(body.encode()).to_bytes(4, "big")
    return base64.urlsafe_b64encode(crc).decode().rstrip("=")
