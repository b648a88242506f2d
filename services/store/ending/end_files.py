"""Composes end files in input order from segments, a block of 4,096 lines at a time.

Memory is bounded whatever the sizes: 32 bytes a line of the block, `_CACHED_BYTES` of payloads,
and pieces of about 1 MiB on their way to the disk.
"""

from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from services.kit.wire.frames import FAILED_FLAG, FRAME_BYTES, NEVER_RAN_FLAG, RESULT_RECORD
from services.kit.wire.result_line import BATCH_CANCELLED, BATCH_EXPIRED, RESULT_LOST
from services.store.blobs.base import BlobDamagedError, BlobMissingError
from services.store.context import Context
from services.store.domain import output, results
from services.store.domain.result_lines import are_lines, is_line
from services.store.domain.results import BLOCK_LINES, Range, Records
from services.store.domain.state import BatchStatus
from services.store.ending import salvage
from services.store.ending.salvage import Losses
from services.store.inputs import input_lines
from services.store.inputs.input_reader import InputReader
from services.store.tables.core import segments
from services.store.work import results_repo

Row = sa.Row[*tuple[Any, ...]]
Kind = Literal["output", "error"]

_CACHED_BYTES: Final = 12 * 1024 * 1024
_LOAD_BYTES: Final = 4 * 1024 * 1024
_SMALL_BYTES: Final = 256 * 1024
_PAGE: Final = 256
_NEVER_RAN: Final = {
    BatchStatus.CANCELLED.value: BATCH_CANCELLED,
    BatchStatus.EXPIRED.value: BATCH_EXPIRED,
}


@dataclass(frozen=True, slots=True)
class _Segment:
    """One segment of the batch; `size` is that of its payload, in its row or in `blob`."""

    id: int
    first: int
    last: int
    records: Records
    blob: str | None
    size: int


_SEGMENTS: Final = (
    sa.select(
        segments.c.id,
        segments.c.first_line,
        segments.c.last_line,
        segments.c.records,
        segments.c.blob,
        sa.func.length(segments.c.payload).label("size"),
    )
    .where(
        segments.c.batch_id == sa.bindparam("batch_id"),
        segments.c.first_line >= sa.bindparam("line"),
        segments.c.first_line < sa.bindparam("end"),
        sa.or_(segments.c.first_line > sa.bindparam("line"), segments.c.id > sa.bindparam("after")),
    )
    .order_by(segments.c.first_line, segments.c.id)
    .limit(_PAGE)
)
_PAYLOADS: Final = sa.select(segments.c.id, segments.c.payload).where(
    segments.c.id.in_(sa.bindparam("ids", expanding=True))
)


def _page(
    connection: sa.Connection, where: Mapping[str, object]
) -> tuple[Sequence[Row], dict[int, bytes]]:
    """Return a page of segments, and their payloads too where all of them are small.

    So a small batch takes one trip to a reader's thread and not two.
    """
    rows = connection.execute(_SEGMENTS, where).all()
    inline = [row for row in rows if row.blob is None]
    if not inline or sum(row.size for row in inline) > _SMALL_BYTES:
        return rows, {}
    found = connection.execute(_PAYLOADS, {"ids": [row.id for row in inline]})
    return rows, {row.id: row.payload for row in found}


class EndFile:
    """The content of one end file of a sealed batch, composed as it is read."""

    def __init__(
        self,
        context: Context,
        reader: InputReader,
        batch: Row,
        kind: Kind,
        losses: Losses | None = None,
    ) -> None:
        """Compose the file of this kind for a batch's row, without what is lost for good."""
        self._context = context
        self._reader = reader
        self._batch = batch
        self._kind = kind
        self._payloads = _Payloads(context)
        # Where the next page of segments begins; they are read once, in order of first line.
        self._line = 0
        self._after = 0
        self._active: list[_Segment] = []
        self._losses = losses
        # Lines whose results are lost, a segment each.
        self._lost: list[npt.NDArray[np.uint32]] = []

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the file's bytes in pieces of about 1 MiB.

        Raises:
            BlobMissingError: a segment or the input is gone.
        """
        buffer: list[bytes | memoryview] = []
        size = 0
        for start in range(0, self._batch.lines_total, BLOCK_LINES):
            end = min(start + BLOCK_LINES, self._batch.lines_total)
            await self._advance(start, end)
            async for piece in self._block(start, end):
                buffer.append(piece)
                size += len(piece)
                if size >= FRAME_BYTES:
                    yield b"".join(buffer)
                    buffer, size = [], 0
        if buffer:
            yield b"".join(buffer)

    async def _advance(self, start: int, end: int) -> None:
        """Make `_active` the segments that hold lines of start..end-1."""
        self._active = [each for each in self._active if each.last >= start]
        while True:
            where = {
                "batch_id": self._batch.id,
                "line": self._line,
                "after": self._after,
                "end": end,
            }
            rows, small = await self._context.db.read(
                lambda connection, where=where: _page(connection, where)  # type: ignore[misc]  # bound now
            )
            self._payloads.keep(small)
            for row in rows:
                records = np.frombuffer(row.records, RESULT_RECORD)
                if self._losses is not None and row.blob in self._losses.blobs:
                    self._lost.append(records["line"].copy())
                    continue
                size = row.size
                if row.blob is not None:
                    size = int((records["offset"].astype(np.int64) + records["length"]).max())
                self._active.append(
                    _Segment(row.id, row.first_line, row.last_line, records, row.blob, size)
                )
            if rows:
                self._line, self._after = rows[-1].first_line, rows[-1].id
            if len(rows) < _PAGE:
                return

    async def _block(self, start: int, end: int) -> AsyncIterator[bytes | memoryview]:
        places = []
        for number, segment in enumerate(self._active):
            lines = segment.records["line"]
            inside = segment.records[(lines >= start) & (lines < end)]
            places.append(output.places(self._of_kind(inside), number))
        own: dict[int, bytes] = {}
        if self._kind == "error":
            async for records, payload in self._unanswered(start, end):
                number = len(self._active) + len(own)
                own[number] = payload
                places.append(output.places(records, number))
        if not places:
            return
        runs = output.merge_order(np.concatenate(places))
        chosen = runs.output if self._kind == "output" else runs.error
        async for piece in self._payloads.copy(chosen.tolist(), self._active, own):
            yield piece

    def _of_kind(self, records: Records) -> Records:
        refused = (records["flags"] & (FAILED_FLAG | NEVER_RAN_FLAG)) != 0
        chosen: Records = records[refused if self._kind == "error" else ~refused]
        return chosen

    async def _unanswered(self, start: int, end: int) -> AsyncIterator[tuple[Records, bytes]]:
        """The store's own lines for those of the block that have no result, or lost it."""
        block = start // BLOCK_LINES
        bits = await self._context.db.read(
            lambda connection: results_repo.bits_of(connection, self._batch.id, [block])
        )
        missing = results.remaining_ranges(bits, [(start, end - start)])
        if missing:
            code = _NEVER_RAN[self._batch.seal_outcome]
            async for lines, ids in self._custom_ids(missing):
                yield output.unanswered_frame(self._batch.id, lines, ids, code)
        if self._lost:
            numbers = np.sort(np.concatenate(self._lost))
            lost = results.pack(numbers[(numbers >= start) & (numbers < end)])
            async for lines, ids in self._custom_ids(lost):
                yield output.unanswered_frame(self._batch.id, lines, ids, RESULT_LOST)

    async def _custom_ids(
        self, lines: Sequence[Range]
    ) -> AsyncIterator[tuple[list[int], list[bytes | None]]]:
        batch, blobs = self._batch, self._context.blobs
        if self._losses is None:
            index = await self._reader.index(batch.index_blob)
            found = input_lines.custom_ids(blobs, batch.input_parts, index, lines)
        else:
            found = salvage.custom_ids(blobs, self._reader, batch, self._losses, lines)
        async for some in found:
            yield some


class _Payloads:
    """Payloads of segments, the last used ones kept."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._kept_bytes = 0

    async def copy(
        self,
        runs: Sequence[tuple[int, int, int]],
        active: Sequence[_Segment],
        own: Mapping[int, bytes],
    ) -> AsyncIterator[bytes | memoryview]:
        """Yield the bytes of runs (segment number, offset, length), in order."""
        for at, (number, offset, length) in enumerate(runs):
            if number in own:
                yield memoryview(own[number])[offset : offset + length]
                continue
            segment = active[number]
            if segment.size > _LOAD_BYTES:
                async for piece in self._long(segment, offset, length):
                    yield piece
                continue
            payload = self._kept.get(segment.id)
            if payload is None:
                await self._load(_next_segments(runs, at, active, own, self._kept))
                payload = self._kept[segment.id]
            self._kept.move_to_end(segment.id)
            yield memoryview(payload)[offset : offset + length]

    async def _long(self, segment: _Segment, offset: int, length: int) -> AsyncIterator[bytes]:
        """Yield one line of a segment that is larger than what is kept."""
        assert segment.blob is not None  # only blobs are that large
        left = length
        for piece_offset, size in _pieces(offset, length):
            piece = await self._read(segment.blob, piece_offset, size)
            begin, left = piece if left == length else None, left - size
            if not is_line(begin, None if left else piece):
                raise BlobDamagedError(segment.blob)
            yield piece

    async def _read(self, name: str, offset: int, size: int) -> bytes:
        """Read as much as there must be: a blob cut short by a fault must not shorten results."""
        data = await self._context.blobs.read(name, offset, size)
        if len(data) != size:
            raise BlobMissingError(name)
        return data

    async def _load(self, wanted: Sequence[_Segment]) -> None:
        rows = [each.id for each in wanted if each.blob is None]
        loaded: dict[int, bytes] = {}
        if rows:
            found = await self._context.db.read(
                lambda connection: connection.execute(_PAYLOADS, {"ids": rows}).all()
            )
            loaded.update((row.id, row.payload) for row in found)
        for each in wanted:
            if each.blob is not None:
                payload = await self._read(each.blob, 0, each.size)
                # Else what lies there in its place would be given out as results.
                if not are_lines(each.records, payload):
                    raise BlobDamagedError(each.blob)
                loaded[each.id] = payload
        self.keep(loaded)

    def keep(self, loaded: Mapping[int, bytes]) -> None:
        """Keep payloads, by segment, instead of those that were last used longest ago."""
        self._kept.update(loaded)
        self._kept_bytes += sum(map(len, loaded.values()))
        while self._kept_bytes > _CACHED_BYTES and len(self._kept) > len(loaded):
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= len(dropped)


def _pieces(offset: int, length: int) -> Iterator[tuple[int, int]]:
    end = offset + length
    while offset < end:
        size = min(FRAME_BYTES, end - offset)
        yield offset, size
        offset += size


def _next_segments(
    runs: Sequence[tuple[int, int, int]],
    at: int,
    active: Sequence[_Segment],
    own: Mapping[int, bytes],
    kept: Mapping[int, bytes],
) -> list[_Segment]:
    """The segments that the runs from `at` on need next, the first one at least."""
    wanted: dict[int, _Segment] = {}
    size = 0
    for number, _, _ in runs[at:]:
        if number in own or number in wanted:
            continue
        segment = active[number]
        if segment.size > _LOAD_BYTES or segment.id in kept:
            continue
        size += segment.size
        if wanted and size > _LOAD_BYTES:
            break
        wanted[number] = segment
    return list(wanted.values())
