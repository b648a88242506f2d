"""What is lost for good of a sealed batch, so that it ends with all the rest."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from services.kit.wire.frames import FAILED_FLAG, NEVER_RAN_FLAG, RESULT_RECORD
from services.store.blobs.base import BlobDamagedError, BlobMissingError, Blobs
from services.store.context import Context
from services.store.domain import results
from services.store.domain.index.line_index import LineIndex
from services.store.domain.result_lines import are_lines, is_line
from services.store.domain.results import Range
from services.store.domain.state import BatchStatus
from services.store.inputs import input_lines
from services.store.inputs.input_reader import InputReader, Parts
from services.store.tables.core import segments

Row = sa.Row[*tuple[Any, ...]]

CONFIRM_SECONDS: Final = 2.0
"""What is missing is looked for once more after so long; only then it counts as lost."""
_AT_ONCE: Final = 8
_PAGE: Final = 256
_READ_BYTES: Final = 4 * 1024 * 1024
"""A segment that is no longer is read whole, to see that it holds lines."""
_BEGIN_BYTES: Final = 64
_UNNAMED_AT_ONCE: Final = 4_096

_BLOBS: Final = (
    sa.select(segments.c.id, segments.c.blob, segments.c.records)
    .where(
        segments.c.batch_id == sa.bindparam("batch_id"),
        segments.c.blob.is_not(None),
        segments.c.id > sa.bindparam("after"),
    )
    .order_by(segments.c.id)
    .limit(_PAGE)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What a batch ends without.

    Attributes:
        blobs: names of what is lost of its input and of its results.
        results: how many lines had a result there.
        completed: how many of these were successes.
        input: whether something of its input is lost.
    """

    blobs: frozenset[str]
    results: int
    completed: int
    input: bool

    def errors(self, input_file_id: str) -> list[dict[str, object]]:
        """Return what is told of it in the batch's `errors`."""
        found: list[dict[str, object]] = []
        if self.input:
            message = (
                f"The content of the input file {input_file_id} was lost from the server's storage "
                "while the batch ran. Where the error file has no custom_id, its line says which "
                "request it is."
            )
            found.append(_error("input_lost", message, "input_file_id"))
        if self.results:
            lines = "1 request" if self.results == 1 else f"{self.results} requests"
            message = (
                f"The results of {lines} were lost from the server's storage. They are in the "
                "error file with the code result_lost; send them again in another batch."
            )
            found.append(_error("results_lost", message, None))
        return found


def _error(code: str, message: str, param: str | None) -> dict[str, object]:
    return {"code": code, "line": None, "message": message, "param": param}


def ends_anyway(batch: Row, now_ms: int) -> bool:
    """Whether a sealed batch waits for nothing that is missing: it was cancelled, or is late."""
    return bool(
        batch.status == BatchStatus.CANCELLING
        or batch.seal_outcome != BatchStatus.COMPLETED
        or batch.expires_ms <= now_ms
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A blob of a batch, with the results in it, if it is one of results."""

    name: str
    size: int
    results: int = 0
    completed: int = 0
    records: npt.NDArray[Any] | None = None


async def look(context: Context, batch: Row) -> Losses:
    """Look twice for all that a batch's end files are made of, its line index apart.

    Raises:
        UnavailableError: something cannot be looked at now.
    """
    missing = await _missing(
        context.blobs, [_Wanted(name, size) for name, size in batch.input_parts or ()]
    )
    async for page in _segments(context, batch.id):
        missing += await _missing(context.blobs, page)
    if missing:
        await asyncio.sleep(CONFIRM_SECONDS)
        missing = await _missing(context.blobs, missing)
    return Losses(
        blobs=frozenset(each.name for each in missing),
        results=sum(each.results for each in missing),
        completed=sum(each.completed for each in missing),
        input=any(not each.results for each in missing),
    )


async def _segments(context: Context, batch_id: str) -> AsyncIterator[list[_Wanted]]:
    after = 0
    while True:
        where = {"batch_id": batch_id, "after": after}
        rows = await context.db.read(
            lambda connection, where=where: connection.execute(_BLOBS, where).all()  # type: ignore[misc]  # bound now
        )
        yield [_wanted(row) for row in rows]
        if len(rows) < _PAGE:
            return
        after = rows[-1].id


def _wanted(row: Row) -> _Wanted:
    records = np.frombuffer(row.records, RESULT_RECORD)
    refused = (records["flags"] & (FAILED_FLAG | NEVER_RAN_FLAG)) != 0
    return _Wanted(
        row.blob,
        int((records["offset"].astype(np.int64) + records["length"]).max()),
        len(records),
        int((~refused).sum()),
        records,
    )


async def _missing(blobs: Blobs, wanted: Sequence[_Wanted]) -> list[_Wanted]:
    """Those that are not there, are shorter than they must be, or hold something else."""
    found: list[_Wanted] = []
    for start in range(0, len(wanted), _AT_ONCE):
        some = wanted[start : start + _AT_ONCE]
        there = await asyncio.gather(*(_is_there(blobs, each) for each in some))
        found += [each for each, is_there in zip(some, there, strict=True) if not is_there]
    return found


async def _is_there(blobs: Blobs, wanted: _Wanted) -> bool:
    try:
        if wanted.records is None:
            last = await blobs.read(wanted.name, max(0, wanted.size - 1), 1)
            return bool(last) or not wanted.size
        return await _holds_lines(blobs, wanted.name, wanted.size, wanted.records)
    except BlobMissingError:
        return False


async def _holds_lines(blobs: Blobs, name: str, size: int, records: npt.NDArray[Any]) -> bool:
    if size <= _READ_BYTES:
        content = await blobs.read(name, 0, size)
        return len(content) == size and are_lines(records, content)
    # Of few lines, or even one.
    for offset, length in records[["offset", "length"]].tolist():
        begin = await blobs.read(name, offset, min(length, _BEGIN_BYTES))
        end = await blobs.read(name, offset + length - 1, 1)
        if not is_line(begin, end):
            return False
    return True


# --- custom ids of what is left of the input ------------------------------------------------------


async def custom_ids(
    blobs: Blobs,
    reader: InputReader,
    batch: Row,
    losses: Losses,
    ranges: Sequence[Range],
) -> AsyncIterator[tuple[list[int], list[bytes | None]]]:
    """Yield lines and their custom ids, as `input_lines.custom_ids`; None for those not known.

    Raises:
        BlobMissingError: something is missing that was there before.
    """
    parts = [(name, size) for name, size in batch.input_parts]
    lost = ranges
    try:
        index = await reader.index(batch.index_blob)
    except BlobMissingError as error:
        if error.name not in losses.blobs and not isinstance(error, BlobDamagedError):
            raise
    else:
        lost = _within(index, parts, losses, ranges)
        known = results.subtract(ranges, lost)
        async for found in input_lines.custom_ids(blobs, parts, index, known, lenient=True):
            yield found
    lines = results.unpack(lost).tolist()
    for start in range(0, len(lines), _UNNAMED_AT_ONCE):
        some = lines[start : start + _UNNAMED_AT_ONCE]
        yield some, [None] * len(some)


def _within(index: LineIndex, parts: Parts, losses: Losses, ranges: Sequence[Range]) -> list[Range]:
    """Those of these lines that lie in a lost part, or nowhere."""
    lines = results.unpack(ranges)
    inside = lines < len(index.records)
    lost: npt.NDArray[np.bool_] = ~inside
    known = lines[inside]
    starts = index.offsets()[known].astype(np.int64)
    ends = starts + index.records["length"][known]
    gone = ends > sum(size for _, size in parts)
    begin = 0
    for name, size in parts:
        if name in losses.blobs:
            gone |= (starts < begin + size) & (ends > begin)
        begin += size
    lost[inside] = gone
    return results.pack(lines[lost])
