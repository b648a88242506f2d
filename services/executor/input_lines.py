"""From frames of input to lines: cuts them apart and finds what an engine and a result line need.

Decoding is by name and by span: `custom_id` and `body` are taken as they stand, so that no value
is read and written anew.
"""

import sys
from typing import Final

import msgspec
import numpy as np
import orjson

from services.kit.wire.frames import LINE_RECORD

NO_CUSTOM_ID: Final = b"null"


class Line(msgspec.Struct, gc=False):
    """A line that waits for a seat."""

    number: int
    """Ordinal in the batch."""
    custom_id: bytes
    """JSON string, quotes included, as it stands in the input."""
    body: bytes
    """JSON object; empty when the line could not be read."""
    retries: int = 0
    """How often it ran again, for whatever reason."""
    counted: int = 0
    """Of those, the ones that used up a try."""
    seats: int = 1
    """Sequences that it runs at once in an engine."""


class _Envelope(msgspec.Struct, gc=False):
    custom_id: msgspec.Raw
    body: msgspec.Raw


_decode = msgspec.json.Decoder(_Envelope).decode

_INDEXED_LEVELS: Final = 1_024
"""How deep a line may be nested; the decoder gives up a little earlier, with Python's stack."""


def _decode_deep(text: bytes) -> _Envelope:
    """Decode a line that is deeper than the stack of this thread was meant to be."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + _INDEXED_LEVELS)
    try:
        return _decode(text)
    finally:
        sys.setrecursionlimit(limit)


def read_line(number: int, text: bytes) -> Line:
    """Return a line of the input. Of a repeated name the last value counts.

    A line that cannot be read (none such passes validation) has an empty body.
    """
    try:
        try:
            envelope = _decode(text)
        except RecursionError:
            envelope = _decode_deep(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return Line(number, _custom_id_of(text), b"")
    return Line(number, bytes(envelope.custom_id), bytes(envelope.body))


def _custom_id_of(text: bytes) -> bytes:
    try:
        value = orjson.loads(text)
        return orjson.dumps(value["custom_id"])
    except (ValueError, TypeError, KeyError):
        return NO_CUSTOM_ID


class LineReader:
    """Puts lines together from frames of `ReadLinesResponse`, one stream at a time."""

    def __init__(self) -> None:
        """Begin before the first frame."""
        self._number = 0
        self._missing = 0
        self._parts: list[bytes] = []

    def feed(self, records: bytes, payload: bytes) -> list[Line]:
        """Return the lines that are whole with this frame.

        Raises:
            ValueError: records and payload do not fit together.
        """
        lines: list[Line] = []
        offset = 0
        if self._missing:
            part = payload[: self._missing]
            self._parts.append(part)
            self._missing -= len(part)
            offset = len(part)
            if not self._missing:
                lines.append(read_line(self._number, b"".join(self._parts)))
                self._parts = []
        table = np.frombuffer(records, LINE_RECORD)
        end = len(payload)
        for number, length in zip(table["line"].tolist(), table["length"].tolist(), strict=True):
            if self._missing:
                raise ValueError("a line begins inside another one")
            if offset + length > end:
                self._number = number
                self._missing = offset + length - end
                self._parts = [payload[offset:]]
                offset = end
                continue
            lines.append(read_line(number, payload[offset : offset + length]))
            offset += length
        if offset != end:
            raise ValueError("bytes without a line")
        return lines

    @property
    def whole(self) -> bool:
        """Whether no line is left half read."""
        return not self._missing
