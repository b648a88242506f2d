"""What an input is made of, and the outcomes that one may have."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.kit.batches import CHAT, Json, chat

BOM: Final = b"\xef\xbb\xbf"

URL: Final = f'"url":"{CHAT}"'


def text(line: Json) -> bytes:
    """One line, without an end."""
    return json.dumps(line, ensure_ascii=False).encode()


def joined(*lines: bytes, end: bytes = b"\n") -> bytes:
    """Lines, each with an end."""
    return b"".join(line + end for line in lines)


def without(line: Json, *path: str) -> bytes:
    """A line that lacks a field."""
    copy = json.loads(json.dumps(line))
    inside = copy
    for name in path[:-1]:
        inside = inside[name]
    del inside[path[-1]]
    return text(copy)


A, B, C = (chat(name, f"text of {name}") for name in "abc")
LINE_A, LINE_B, LINE_C = text(A), text(B), text(C)


def nested(depth: int) -> bytes:
    """The second line with a field so deep; json.dumps itself would give up on it."""
    return LINE_B[:-2] + b',"x":' + b"[" * depth + b"]" * depth + b"}}"


EMBEDDING: Final = text(
    {
        "custom_id": "b",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": "simulated", "input": "hello"},
    }
)


@dataclass(frozen=True, kw_only=True)
class Completes:
    """The batch completes."""

    lines: dict[str, str | None]
    """custom_id → the text that is answered, None for an error line; in the order of the input."""


@dataclass(frozen=True, kw_only=True)
class Fails:
    """The batch fails before any line ran, with exactly these faults in this order."""

    faults: tuple[tuple[int | None, str, str | None], ...]
    """Line, code, param."""
    says: str = ""
    """A part of the first message."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The upload is answered 400."""

    says: str


@dataclass(frozen=True, kw_only=True)
class Input:
    """A file and what must become of it."""

    name: str
    data: bytes | Callable[[], bytes]
    outcome: Completes | Fails | Refused

    def content(self) -> bytes:
        """The file; large ones are made only here."""
        return self.data if isinstance(self.data, bytes) else self.data()


ABC: Final = Completes(lines={name: f"text of {name}" for name in "abc"})
AB: Final = Completes(lines={name: f"text of {name}" for name in "ab"})
MISSING: Final = "missing_required_parameter"
FORMAT: Final = "Invalid file format for Batch API. Must be .jsonl"


def fails(line: int | None, code: str, param: str | None, says: str = "") -> Fails:
    return Fails(faults=((line, code, param),), says=says)


def second(changed: bytes) -> bytes:
    return joined(LINE_A, changed, LINE_C)
