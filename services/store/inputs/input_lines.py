"""Lines of a batch's input, read in frames: for executors, and to name lines that never ran."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson

from services.kit.wire.frames import FRAME_BYTES, LINE_RECORD
from services.kit.wire.result_line import custom_id_json
from services.store.blobs.base import BlobDamagedError, Blobs
from services.store.domain import results
from services.store.domain.index.line_index import LineIndex
from services.store.domain.results import Range
from services.store.inputs.input_reader import Parts, read_span

_NEAR_BYTES: Final = 64 * 1024
"""Lines that lie closer than this are read at once, what lies between them included."""
_AT_ONCE_BYTES: Final = 4 * 1024 * 1024
"""Read at once, with what lies between: of a model that has few lines of a file most is others'."""
_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Group:
    """Lines that fit a frame together, or one that does not; bytes without line ends."""

    lines: npt.NDArray[np.uint32]
    offsets: _Numbers
    lengths: _Numbers

    @property
    def is_long(self) -> bool:
        return int(self.lengths.sum()) > FRAME_BYTES


async def frames(
    blobs: Blobs, parts: Parts, index: LineIndex, ranges: Sequence[Range]
) -> AsyncIterator[tuple[bytes, bytes]]:
    """Yield (LINE_RECORDs, payload of at most `FRAME_BYTES`) for these lines, in their order.

    A longer line goes on in frames without records. Raises BlobMissingError, also where line feeds
    are not where they were.
    """
    for group in _groups(parts, index, ranges):
        records = np.zeros(len(group.lines), LINE_RECORD)
        records["line"] = group.lines
        records["length"] = group.lengths
        if not group.is_long:
            payload = await _payload(blobs, parts, group)
            if len(payload) != int(group.lengths.sum()):
                # Line feeds lie within lines: it is as long as ever, and another text.
                raise BlobDamagedError(_part_at(parts, int(group.offsets[0])))
            yield records.tobytes(), payload
            continue
        offset, left = int(group.offsets[0]), int(group.lengths[0])
        head = records.tobytes()
        while left > 0:
            size = min(left, FRAME_BYTES)
            yield head, await read_span(blobs, parts, offset, size)
            head = b""
            offset += size
            left -= size


async def custom_ids(
    blobs: Blobs,
    parts: Parts,
    index: LineIndex,
    ranges: Sequence[Range],
    *,
    lenient: bool = False,
) -> AsyncIterator[tuple[list[int], list[bytes | None]]]:
    """Yield ordinals and their custom ids as JSON strings, some at a time, in their order.

    The lines must be sound, as those of a batch that runs are. Raises BlobMissingError; where
    `lenient`, a line that is there and cannot be read has None.
    """
    for group in _groups(parts, index, ranges):
        payload = await _payload(blobs, parts, group)
        ids = await asyncio.to_thread(_ids, payload, group.lengths)
        if None in ids and not lenient:
            raise BlobDamagedError(parts[0][0])
        yield group.lines.tolist(), ids


def _ids(payload: bytes, lengths: _Numbers) -> list[bytes | None]:
    """The custom ids of lines as JSON strings; None where a line is not what it was."""
    view = memoryview(payload)
    ends = np.cumsum(lengths).tolist()
    ids: list[bytes | None] = []
    start = 0
    for end in ends:
        try:
            ids.append(custom_id_json(orjson.loads(view[start:end])["custom_id"]))
        except (ValueError, KeyError, TypeError):
            ids.append(None)
        start = end
    return ids


def _groups(parts: Parts, index: LineIndex, ranges: Sequence[Range]) -> Iterator[_Group]:
    for first, count in ranges:
        if first + count > len(index.records):
            # The index is not that of this input any more.
            raise BlobDamagedError(parts[0][0])
    lines = results.unpack(ranges)
    rows = index.records[lines]
    lengths = rows["length"].astype(np.int64)
    offsets = (rows["offset_high"].astype(np.int64) << 32) | rows["offset_low"].astype(np.int64)
    ends = np.cumsum(lengths)
    start = 0
    while start < len(lines):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + FRAME_BYTES, side="right"))
        stop = max(stop, start + 1)
        yield _Group(lines[start:stop], offsets[start:stop], lengths[start:stop])
        start = stop


async def _payload(blobs: Blobs, parts: Parts, group: _Group) -> bytes:
    """The bytes of a group's lines, one after the other."""
    offsets, lengths = group.offsets, group.lengths
    ends = offsets + lengths
    pieces = []
    for start, stop in _runs(offsets, ends):
        base = int(offsets[start])
        data = await read_span(blobs, parts, base, int(ends[stop - 1]) - base)
        if (offsets[start + 1 : stop] - ends[start : stop - 1] == 1).all():
            # Only line feeds lie between, and no line holds one.
            pieces.append(data.replace(b"\n", b""))
            continue
        begins = (offsets[start:stop] - base).tolist()
        stops = (ends[start:stop] - base).tolist()
        pieces.extend(data[i:j] for i, j in zip(begins, stops, strict=True))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _runs(offsets: _Numbers, ends: _Numbers) -> Iterator[tuple[int, int]]:
    """Yield (first, one behind the last) of the lines that are read at once."""
    far = (np.flatnonzero(offsets[1:] - ends[:-1] > _NEAR_BYTES) + 1).tolist()
    at = 0
    for stop in (*far, len(offsets)):
        while at < stop:
            most = offsets[at] + _AT_ONCE_BYTES
            behind = max(at + 1, int(np.searchsorted(ends[:stop], most, side="right")))
            yield at, behind
            at = behind


def _part_at(parts: Parts, offset: int) -> str:
    """Return the name of the part that holds this byte of a file."""
    end = 0
    for name, size in parts:
        end += size
        if offset < end:
            return name
    return parts[-1][0]
