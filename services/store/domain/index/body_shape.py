"""What a file without a single JSON object looks like instead, said to who uploaded it."""

import re
from enum import StrEnum
from typing import Final

import orjson

HEAD_BYTES: Final = 512
"""How much of a file's start is looked at."""

INVALID_FORMAT: Final = "Invalid file format for Batch API. Must be .jsonl"
INVALID_ENCODING: Final = "Invalid file for Batch API. Must be utf-8 encoded"


class Shape(StrEnum):
    """What the file's start looks like; of use only where no line is an object."""

    LINES = "lines"
    EMPTY = "empty"
    UTF16 = "utf-16"
    NOT_UTF8 = "not-utf-8"
    GZIP = "gzip"
    ZIP = "zip"
    ARRAY = "array"
    PRETTY = "pretty"
    LONE_CR = "lone-cr"
    CSV = "csv"


_ADVICE: Final = {
    Shape.LINES: f"{INVALID_FORMAT}: no line is a JSON object. Write one JSON object per line.",
    Shape.EMPTY: f"{INVALID_FORMAT}: the file is empty. Write at least one request, as one JSON "
    "object on one line.",
    Shape.UTF16: f"{INVALID_ENCODING}: the file looks like UTF-16 or UTF-32. Save it as UTF-8.",
    Shape.NOT_UTF8: f"{INVALID_ENCODING}: no line is valid UTF-8. Save it as UTF-8.",
    Shape.GZIP: f"{INVALID_FORMAT}: the file looks like gzip. Decompress it before uploading.",
    Shape.ZIP: f"{INVALID_FORMAT}: the file looks like a ZIP archive or an office document. "
    "Upload the JSON lines themselves.",
    Shape.ARRAY: f"{INVALID_FORMAT}: the file looks like a JSON array. Write one JSON object per "
    "line, without brackets around them or commas between them.",
    Shape.PRETTY: f"{INVALID_FORMAT}: the file looks like JSON spread over several lines. Write "
    "each request on one line.",
    Shape.LONE_CR: f"{INVALID_FORMAT}: the lines end with a carriage return alone. End each with "
    "a line feed.",
    Shape.CSV: f"{INVALID_FORMAT}: the file looks like CSV. Write one JSON object per line.",
}

_COLUMNS = re.compile(rb"[^\n,;\t{}\[\]]+([,;\t][^\n,;\t{}\[\]]*)+\r?(\n|$)")


def look_at(head: bytes, *, requests: int, undecodable: bool, lone_cr: bool) -> Shape:
    """Guesses from the first `HEAD_BYTES` of a file and what its lines were.

    `undecodable`: no line was valid UTF-8. `lone_cr`: a line that could not be read holds a
    carriage return in its middle.
    """
    if _is_utf16(head):
        return Shape.UTF16
    if head.startswith(b"\x1f\x8b"):
        return Shape.GZIP
    if head.startswith(b"PK\x03\x04"):
        return Shape.ZIP
    if not requests:
        return Shape.EMPTY
    if undecodable:
        return Shape.NOT_UTF8
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if b"\0" in head:
        # Of what is no text, neither a carriage return nor a comma says anything.
        return Shape.LINES
    if lone_cr:
        return Shape.LONE_CR
    if text.startswith(b"["):
        return Shape.ARRAY
    if requests > 1 and _is_spread(text):
        return Shape.PRETTY
    return Shape.CSV if _COLUMNS.match(text) else Shape.LINES


def _is_spread(head: bytes) -> bool:
    """Whether an object begins on the first line and goes on where the second one begins.

    The lines of a file may all be broken in other ways. Of a first line that is longer than the
    head nothing is known.
    """
    # What the head's end cuts in two is no fault.
    text = head.decode(errors="ignore")
    first, line_end, _ = text.partition("\n")
    if not line_end or not first.startswith("{") or _stops_at(first) < len(first):
        return False
    return _stops_at(text) > len(first) + 1


def _stops_at(text: str) -> int:
    """Return where a text stops being JSON, in characters; its length where it only ends."""
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return error.pos
    return len(text)


def refusal(shape: Shape) -> str:
    """The message of the 400 for a file without a JSON object: what it is and what to change."""
    return _ADVICE[shape]


def _is_utf16(head: bytes) -> bool:
    """By its mark, or by every second byte of the start being zero, as ASCII in UTF-16 is."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return True
    start = head[:16]
    return len(start) >= 4 and (not any(start[0::2]) or not any(start[1::2])) and any(start)
