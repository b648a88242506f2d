"""What is known of each line of an input file, learnt while the file is uploaded.

One pass, before any endpoint is known: 24 bytes a line, enough to check it and cut chunks without
reading the file again. A line is parsed whole and strictly, unless it is too long or holds too many
values. It ends at LF (or CR LF). A *request* is a line of more than white space, counted from 0.
"""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from services.kit.wire.values import MOST_VALUES, too_many_values
from services.store.domain.index import names
from services.store.domain.index.body_fields import (
    HAS_INPUT,
    HAS_MESSAGES,
    HAS_PROMPT,
    SCORING_FIELDS,
    scoring_flags,
)
from services.store.domain.index.body_shape import HEAD_BYTES, Shape, look_at
from services.store.domain.index.names import Names
from services.store.domain.index.plain_text import is_blank, is_utf8

MAX_CUSTOM_ID_CHARS: Final = 512
ANOTHER: Final = names.ANOTHER
"""Id of a url or model that the head does not name."""
MAX_NAME_CHARS: Final = names.MAX_NAME_CHARS

BOM: Final = b"\xef\xbb\xbf"

# Facts of a line that hold for any endpoint; which fault it has is found by reading it.
OBJECT: Final = 1 << 0
CUSTOM_ID_OK: Final = 1 << 1
"""A string of 1 to 512 characters; only then the hash means anything."""
METHOD_POST: Final = 1 << 2
URL_STRING: Final = 1 << 3
BODY_OBJECT: Final = 1 << 4
MODEL_STRING: Final = 1 << 5
# Bits 6 to 8, 13 and 14 are in `body_fields`.
STREAM: Final = 1 << 9
NOT_UTF8: Final = 1 << 10
NOT_JSON: Final = 1 << 11
TOO_LONG: Final = 1 << 12
"""Above `max_line_bytes`; not parsed, so no other fact is known."""
TOO_MANY: Final = 1 << 15
"""More values than `services.kit.wire.values` allows; not parsed either."""
UNPARSED: Final = TOO_LONG | TOO_MANY

RECORD: Final = np.dtype(
    [
        ("hash", "<u8"),
        ("offset_low", "<u4"),
        ("length", "<u4"),
        ("offset_high", "<u2"),
        ("url", "<u2"),
        ("model", "<u2"),
        ("flags", "<u2"),
    ]
)
"""24 bytes a request; `offset` is split because numpy has no 48-bit integer."""

BREAK: Final = np.dtype([("ordinal", "<u8"), ("skipped", "<u8")])
"""From `ordinal` on, `skipped` lines in all were no requests."""

Records = npt.NDArray[np.void]

_MAGIC: Final = b"NSLINES\x01"
_HEAD_LENGTH_BYTES: Final = 8
_U32_MAX: Final = 2**32 - 1
_CR: Final = 0x0D
_pack: Final = struct.Struct("<QIIHHHH").pack
_pack_break: Final = struct.Struct("<QQ").pack


class IndexFormatError(ValueError):
    """The bytes are no line index of a version that this code reads."""


@dataclass(frozen=True, slots=True)
class LineIndex:
    """The finished index of a file.

    `lines`: requests in the file; `records` holds at most the first `max_lines` + 1 of them.
    `any_object`: at least one line is a JSON object. `shape`: what the file looks like otherwise.
    `urls`, `models`: distinct names, by the ids in the records.
    """

    lines: int
    any_object: bool
    shape: Shape
    urls: tuple[str, ...]
    models: tuple[str, ...]
    records: Records
    breaks: Records

    @property
    def truncated(self) -> bool:
        """Whether the file has more requests than the index describes."""
        return self.lines > len(self.records)

    def offsets(self) -> npt.NDArray[np.uint64]:
        """Where each recorded request starts in the file, in bytes."""
        offsets: npt.NDArray[np.uint64] = self.records["offset_high"].astype(np.uint64)
        offsets <<= np.uint64(32)
        offsets |= self.records["offset_low"]
        return offsets

    def span(self, ordinal: int) -> tuple[int, int]:
        """(offset, length) in bytes of a request in the file, its line end left out.

        Raises IndexError when it is not recorded.
        """
        record = self.records[ordinal]
        return int(record["offset_high"]) << 32 | int(record["offset_low"]), int(record["length"])

    def physical_line(self, ordinal: int) -> int:
        """The line number, from 1, that an editor shows for this request."""
        at = int(np.searchsorted(self.breaks["ordinal"], ordinal, side="right"))
        return ordinal + 1 + (int(self.breaks["skipped"][at - 1]) if at else 0)

    def to_bytes(self) -> bytes:
        """A versioned head, the records, the breaks. Read back by `from_bytes`."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes | memoryview]:
        """`to_bytes` in pieces, the large ones views into this index."""
        head = orjson.dumps(
            {
                "lines": self.lines,
                "records": len(self.records),
                "breaks": len(self.breaks),
                "any_object": self.any_object,
                "shape": self.shape.value,
                "urls": self.urls,
                "models": self.models,
            }
        )
        head += b" " * (-len(head) % 8)
        length = len(head).to_bytes(_HEAD_LENGTH_BYTES, "little")
        yield b"".join((_MAGIC, length, head))
        for table in (self.records, self.breaks):
            # Of an empty array numpy makes no view.
            if len(table):
                yield np.ascontiguousarray(table).view(np.uint8).data

    @classmethod
    def from_bytes(cls, data: bytes) -> "LineIndex":
        """Views into `data`, nothing copied. Raises IndexFormatError."""
        start = len(_MAGIC) + _HEAD_LENGTH_BYTES
        if data[: len(_MAGIC)] != _MAGIC or len(data) < start:
            raise IndexFormatError("not a line index of this version")
        head_end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
        try:
            head = orjson.loads(data[start:head_end])
            records_end = head_end + head["records"] * RECORD.itemsize
            if records_end + head["breaks"] * BREAK.itemsize != len(data):
                raise IndexFormatError("a line index of the wrong length")
            return cls(
                lines=head["lines"],
                any_object=head["any_object"],
                shape=Shape(head["shape"]),
                urls=tuple(head["urls"]),
                models=tuple(head["models"]),
                records=np.frombuffer(data, RECORD, head["records"], head_end),
                breaks=np.frombuffer(data, BREAK, head["breaks"], records_end),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise IndexFormatError(f"a damaged line index: {error}") from error


class LineIndexer:
    """Takes a file in pieces cut anywhere and makes its index.

    Memory: 24 bytes a request and 16 a gap of blank lines, both for at most `max_lines` + 1
    requests, the open line up to `max_line_bytes` (and, while it is parsed, its values), and names
    up to 2 MiB. Requests beyond `max_lines` + 1 are counted only. `key` seeds the hash of custom
    ids, so that who does not know it cannot make ids that collide. `max_line_bytes` counts neither
    line end nor byte-order mark.
    """

    def __init__(self, *, max_lines: int, max_line_bytes: int, key: bytes) -> None:
        self._max_records = max_lines + 1
        self._max_line_bytes = max_line_bytes
        # What is smaller is neither too long nor of too many values.
        self._small_bytes = min(max_line_bytes, MOST_VALUES)
        # What is kept of an open line; one that is longer is too long even without BOM and CR.
        self._max_open = max_line_bytes + len(BOM) + 1
        self._seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        self._urls = Names()
        self._models = Names()
        self._packed = bytearray()
        self._packed_breaks = bytearray()
        self._requests = 0
        self._skipped = 0
        self._skipped_before = 0
        self._first = True
        self._any_object = False
        self._lone_cr = False
        self._head = b""
        self._position = 0
        self._open = bytearray()
        self._dropped = 0
        self._index: LineIndex | None = None

    @property
    def open_bytes(self) -> int:
        """Bytes kept of the line whose end has not come."""
        return len(self._open)

    def feed(self, data: bytes) -> None:
        """Takes the file's next bytes, any number of them. ValueError after `finish`."""
        if self._index is not None:
            raise ValueError("the index is finished")
        if len(self._head) < HEAD_BYTES:
            self._head += data[: HEAD_BYTES - len(self._head)]
        if self._open or self._dropped:
            end = data.find(b"\n")
            self._extend_open(data if end < 0 else data[:end])
            if end < 0:
                return
            self._close_open()
            data = data[end + 1 :]
        lines = data.split(b"\n")
        tail = lines.pop()
        for line in lines:
            self._take(line)
        self._extend_open(tail)

    def finish(self) -> LineIndex:
        """The index of what was fed; the same one when called again."""
        if self._index is None:
            if self._open or self._dropped:
                self._close_open()
            # A view: of a million lines, a copy would be 24 MB.
            records = np.frombuffer(self._packed, RECORD)
            records.flags.writeable = False
            self._index = LineIndex(
                lines=self._requests,
                any_object=self._any_object,
                shape=Shape.LINES if self._any_object else self._look(records),
                urls=tuple(self._urls.ids),
                models=tuple(self._models.ids),
                records=records,
                breaks=np.frombuffer(bytes(self._packed_breaks), BREAK),
            )
        return self._index

    def _look(self, records: Records) -> Shape:
        return look_at(
            self._head,
            requests=self._requests,
            undecodable=bool(np.all(records["flags"] & NOT_UTF8)),
            lone_cr=self._lone_cr,
        )

    def _extend_open(self, data: bytes) -> None:
        """Adds to the line whose end has not come; of one that is too long only the start stays."""
        if self._dropped:
            self._dropped += len(data)
            return
        self._open += data
        if len(self._open) > self._max_open:
            self._note_lone_cr(self._open)
            self._dropped = len(self._open)
            self._open.clear()

    def _close_open(self) -> None:
        if self._dropped:
            self._take_too_long(self._dropped)
            self._dropped = 0
        else:
            line = bytes(self._open)
            self._open.clear()
            self._take(line)

    def _take(self, line: bytes) -> None:
        """One whole line, its LF left out."""
        if self._requests >= self._max_records or (
            len(line) > self._small_bytes
            and (len(line) > self._max_line_bytes or too_many_values(line))
        ):
            self._take_unusual(line)
            return
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            self._take_unusual(line)
            return
        self._first = False
        size = len(line)
        self._record(self._position, size - 1 if line[-1] == _CR else size, value)
        self._position += size + 1

    def _take_unusual(self, line: bytes) -> None:
        """A line that is blank, broken, too large, one too many, or with the byte-order mark.

        Every line could go this way: `_take` only saves the usual ones the checks.
        """
        start = len(BOM) if self._first and line.startswith(BOM) else 0
        text = line[start:].removesuffix(b"\r")
        if len(text) > self._max_line_bytes:
            self._note_lone_cr(line)
            self._take_too_long(len(line))
            return
        offset = self._position + start
        self._position += len(line) + 1
        self._first = False
        if is_blank(text):
            self._skipped += 1
        elif self._requests >= self._max_records and self._any_object:
            self._requests += 1
        elif too_many_values(text):
            self._append(0, offset, len(text), ANOTHER, ANOTHER, TOO_MANY)
        else:
            try:
                self._record(offset, len(text), orjson.loads(text))
            except orjson.JSONDecodeError:
                self._note_lone_cr(text)
                fault = NOT_JSON if is_utf8(text) else NOT_UTF8
                self._append(0, offset, len(text), ANOTHER, ANOTHER, fault)

    def _take_too_long(self, size: int) -> None:
        """A line of `size` bytes of which nothing is known but where it lies."""
        self._first = False
        self._append(0, self._position, min(size, _U32_MAX), ANOTHER, ANOTHER, TOO_LONG)
        self._position += size + 1

    def _note_lone_cr(self, line: bytes | bytearray) -> None:
        # The same window for a line seen whole and one of which only the start was kept.
        self._lone_cr |= b"\r" in line[: self._max_open].removesuffix(b"\r")

    def _record(self, offset: int, length: int, value: Any) -> None:
        """The facts of a line that is JSON."""
        if type(value) is not dict:
            self._append(0, offset, length, ANOTHER, ANOTHER, 0)
            return
        self._any_object = True
        if self._requests >= self._max_records:
            # Only counted, so that names of it are none of the file's.
            self._requests += 1
            return
        flags = OBJECT
        digest = 0
        url_id = model_id = ANOTHER
        custom_id = value.get("custom_id")
        if type(custom_id) is str and 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            flags |= CUSTOM_ID_OK
            digest = xxhash.xxh3_64_intdigest(custom_id.encode(), self._seed)
        if value.get("method") == "POST":
            flags |= METHOD_POST
        url = value.get("url")
        if type(url) is str:
            flags |= URL_STRING
            url_id = self._urls.id_of(url)
        body = value.get("body")
        if type(body) is dict:
            flags |= _body_flags(body)
            if flags & MODEL_STRING:
                model_id = self._models.id_of(body["model"])
        self._append(digest, offset, length, url_id, model_id, flags)

    def _append(
        self, digest: int, offset: int, length: int, url: int, model: int, flags: int
    ) -> None:
        ordinal = self._requests
        self._requests = ordinal + 1
        if ordinal >= self._max_records:
            return
        if self._skipped != self._skipped_before:
            self._note_break(ordinal, self._skipped)
        self._packed += _pack(digest, offset & _U32_MAX, length, offset >> 32, url, model, flags)

    def _note_break(self, ordinal: int, skipped: int) -> None:
        self._skipped_before = skipped
        self._packed_breaks += _pack_break(ordinal, skipped)


def _body_flags(body: dict[str, Any]) -> int:
    flags = BODY_OBJECT
    if type(body.get("model")) is str:
        flags |= MODEL_STRING
    if body.get("messages") is not None:
        flags |= HAS_MESSAGES
    if body.get("prompt") is not None:
        flags |= HAS_PROMPT
    if body.get("input") is not None:
        flags |= HAS_INPUT
    if not SCORING_FIELDS.isdisjoint(body):
        flags |= scoring_flags(body)
    if body.get("stream") is True:
        flags |= STREAM
    return flags
