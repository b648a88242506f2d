"""Where a stream of a batch's events stands: the id of the last event that its reader has.

12        everything up to the commit 12, the batch as it then stood included
12.5      of the results of commit 12 the first five lines, and everything before
12.5.80   of the next line also 80 bytes; only between two pages of one stream
o900      the output file up to byte 900: a stream that began, or began again, after the end
e900      the error file likewise, after the whole output file
n900      of the error file what never ran, up to byte 900, after all that ran was told
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

Part = Literal["output", "error", "never_ran"]

_LIVE: Final = re.compile(r"(\d{1,15})(?:\.(\d{1,15})(?:\.(\d{1,15}))?)?", re.ASCII)
_IN_FILE: Final = re.compile(r"([oen])(\d{1,15})", re.ASCII)
_LETTERS: Final[dict[Part, str]] = {"output": "o", "error": "e", "never_ran": "n"}
_PARTS: Final[dict[str, Part]] = {letter: part for part, letter in _LETTERS.items()}


class CursorError(ValueError):
    """The text is no event id."""


@dataclass(frozen=True, slots=True)
class Live:
    """All commits before `version` were told, of it `lines` lines, and `offset` bytes of the next.

    The first commit of a batch is 1.
    """

    version: int
    lines: int = 0
    offset: int = 0

    @property
    def told(self) -> int:
        """The last commit that was told whole."""
        return self.version - 1

    def __str__(self) -> str:
        if not (self.lines or self.offset):
            return str(self.version - 1)
        if not self.offset:
            return f"{self.version}.{self.lines}"
        return f"{self.version}.{self.lines}.{self.offset}"


@dataclass(frozen=True, slots=True)
class InFile:
    """An end file was told up to a byte; `never_ran` is the error file, of which only those lines
    are told."""

    part: Part
    offset: int = 0

    def __str__(self) -> str:
        return f"{_LETTERS[self.part]}{self.offset}"


Cursor = Live | InFile

START: Final = Live(1)


def parse(text: str) -> Cursor:
    """Return the place that an event id names; the start for an empty one.

    Raises:
        CursorError: it is none.
    """
    if not text:
        return START
    if (match := _IN_FILE.fullmatch(text)) is not None:
        return InFile(_PARTS[match[1]], int(match[2]))
    match = _LIVE.fullmatch(text)
    if match is None:
        raise CursorError(text)
    version, lines, offset = (int(group) if group else 0 for group in match.groups())
    if match[2] is None:
        return Live(version + 1)
    if version < 1:
        raise CursorError(text)
    return Live(version, lines, offset)
