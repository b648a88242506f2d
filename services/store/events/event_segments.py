"""Result lines of a running batch, out of its segments in order of commit, a page at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from services.kit.wire.errors import InvalidRequestError
from services.kit.wire.frames import RESULT_RECORD
from services.store.blobs.base import BlobDamagedError, BlobMissingError, Blobs
from services.store.domain.event_cursor import Live
from services.store.domain.result_lines import is_line
from services.store.domain.results import Records
from services.store.events import events_repo

Row = sa.Row[Any]

PAGE_BYTES: Final = 256 * 1024
"""Lines of a page; a longer line is told in pieces of this size."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Lines of one commit; their bytes are `payload`, or in a blob."""

    version: int
    records: Records
    payload: bytes | None
    blob: str | None


@dataclass(frozen=True, slots=True)
class Segments:
    """Those to come, as many as fill a page; `last` where no further one follows."""

    rows: Sequence[Segment] = ()
    last: bool = True


def load(connection: sa.Connection, batch: Row, cursor: Live) -> Segments:
    """Return the segments that come after `cursor`, as many as fill a page.

    Raises:
        InvalidRequestError: the batch has no such place.
    """
    rows = events_repo.segments_after(connection, batch, cursor)
    chosen: list[tuple[Row, Records]] = []
    size = 0
    for row in rows:
        records = np.frombuffer(row.records, RESULT_RECORD)
        told = 0
        if row.version == cursor.version:
            told = cursor.lines
            if not _is_within(records, cursor):
                raise no_such_event(str(cursor))
        chosen.append((row, records))
        size += int(records["length"][told:].sum(dtype=np.int64))
        if size >= PAGE_BYTES:
            break
    payloads = events_repo.payloads(connection, [row.id for row, _ in chosen if row.blob is None])
    return Segments(
        [Segment(row.version, records, payloads.get(row.id), row.blob) for row, records in chosen],
        last=len(chosen) == len(rows) < events_repo.SEGMENTS,
    )


def _is_within(records: Records, cursor: Live) -> bool:
    """Whether a cursor points inside this commit."""
    if cursor.lines >= len(records):
        return cursor.lines == len(records) and not cursor.offset
    return cursor.offset < int(records["length"][cursor.lines])


@dataclass(slots=True)
class Told:
    """Lines of one page. `all`: nothing is left; else the next page begins `at`."""

    at: Live
    all: bool = False
    lines: list[bytes] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)


async def compose(segments: Segments, cursor: Live, blobs: Blobs) -> Told:
    """Return the lines of the next page.

    Raises:
        BlobMissingError: their blob is missing, or holds no such lines.
    """
    told = Told(cursor)
    room = PAGE_BYTES
    for segment in segments.rows:
        if segment.version != told.at.version:
            told.at = Live(segment.version)
        source = _Source(segment, blobs)
        places = segment.records[["offset", "length"]][told.at.lines :].tolist()
        for start, length in places:
            begun = told.at.offset
            left = length - begun
            if left > room and told.lines:
                return told
            size = min(left, PAGE_BYTES)
            told.lines.append(await source.line(start + begun, size, begun=begun, left=left))
            if size < left:
                told.at = Live(segment.version, told.at.lines, begun + size)
                return told
            told.at = Live(segment.version, told.at.lines + 1)
            told.ids.append(str(told.at))
            room -= size
        told.at = Live(segment.version + 1)
    told.all = segments.last
    return told


class _Source:
    """The bytes of a segment's payload; of a blob, a window that moves on with the lines."""

    def __init__(self, segment: Segment, blobs: Blobs) -> None:
        self._blob = segment.blob
        self._blobs = blobs
        self._start = 0
        self._window = segment.payload or b""
        ends = segment.records["offset"].astype(np.int64) + segment.records["length"]
        self._end = int(ends.max())

    async def line(self, offset: int, length: int, *, begun: int, left: int) -> bytes:
        """Read `length` bytes of a line of which `begun` were read before, and `left` are left.

        Raises:
            BlobMissingError: there are none, or they are not of a line.
        """
        piece = await self._read(offset, length)
        if self._blob is not None and not is_line(
            None if begun else piece, piece if length == left else None
        ):
            raise BlobDamagedError(self._blob)
        return piece

    async def _read(self, offset: int, length: int) -> bytes:
        at = offset - self._start
        if self._blob is not None and not 0 <= at <= len(self._window) - length:
            wanted = min(max(length, PAGE_BYTES), self._end - offset)
            self._window = await self._blobs.read(self._blob, offset, wanted)
            self._start, at = offset, 0
            if len(self._window) < length:
                raise BlobMissingError(self._blob)
        return self._window[at : at + length]


def no_such_event(after: str) -> InvalidRequestError:
    """Return the refusal of a place that a batch does not have."""
    return InvalidRequestError(
        f"This batch has no event '{after[:100]}'. Give the id of the last event that you had, or "
        "none to begin at the first.",
        code="invalid_value",
        param="after",
    )
