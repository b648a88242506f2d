"""Whether every line that was cut is on its way exactly once, and who has it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from services.store.domain.checks import statement
from services.store.domain.checks.batch_check import BatchFacts
from services.store.domain.checks.cut_check import Cut
from services.store.domain.checks.fault import Fault, spoken
from services.store.domain.results import Range, count_lines, normalise, pack

Mask = npt.NDArray[np.bool_]

_BY_HAND: Final = "Stop nightshift, run the statement, and check again."
_RANGE_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFacts:
    """A chunk's row; the names are those of the columns."""

    id: str
    pool_id: str
    model: str | None
    batch_seq: int
    lines: bytes
    first_line: int
    line_count: int
    state: str
    dispatch: int
    attempts: int

    @property
    def is_open(self) -> bool:
        """Whether something of it may be left to do."""
        return self.state != "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """An attempt's row; the names are those of the columns."""

    token: str
    chunk_id: str
    dispatch: int
    number: int
    closed_ms: int | None


def unpack_ranges(packed: bytes) -> list[Range] | None:
    """Return the ranges of a chunk; None where they are none."""
    if not packed or len(packed) % _RANGE_BYTES:
        return None
    pairs = np.frombuffer(packed, "<u4").reshape(-1, 2).tolist()
    ranges = [(first, count) for first, count in pairs]
    return ranges if normalise(ranges) == ranges else None


def chunk_faults(
    batch: BatchFacts, chunks: Sequence[ChunkFacts], cut: Cut, done: Mask
) -> Iterator[Fault]:
    """Check the chunks of a batch; `done`: a flag for each of its lines that has a result."""
    claims = np.zeros(batch.lines_total, np.uint16)
    ever = np.zeros(batch.lines_total, np.bool_)
    held: list[tuple[ChunkFacts, list[Range]]] = []
    for chunk in chunks:
        ranges = unpack_ranges(chunk.lines)
        if ranges is None or sum(ranges[-1]) > batch.lines_total:
            yield _fault(
                chunk, f"its lines cannot be read, in {batch.id}", "Cancel that batch.", ""
            )
            return
        held.append((chunk, ranges))
        for first, count in ranges:
            ever[first : first + count] = True
            claims[first : first + count] += chunk.is_open
        yield from _row_faults(batch, chunk, ranges, cut)
    if not cut.is_known:
        return
    yield from cut.beyond(ever)
    if batch.sealed_ms is None:
        yield from _coverage_faults(batch, held, claims, cut.mask() & ~done)


def _row_faults(
    batch: BatchFacts, chunk: ChunkFacts, ranges: Sequence[Range], cut: Cut
) -> Iterator[Fault]:
    key = {"id": chunk.id}
    if (chunk.first_line, chunk.line_count) != (ranges[0][0], count_lines(ranges)):
        yield _fault(
            chunk,
            f"says {chunk.line_count} lines from {chunk.first_line}, and holds"
            f" {count_lines(ranges)} from {ranges[0][0]}, in {batch.id}",
            _BY_HAND,
            statement.update(
                "chunks", key, first_line=ranges[0][0], line_count=count_lines(ranges)
            ),
        )
    place = cut.place_of(chunk.model)
    if place is None and cut.is_known:
        yield _fault(chunk, f"is of a model that {batch.id} has not", "Cancel that batch.", "")
    elif place is not None and (chunk.pool_id, chunk.batch_seq) != place:
        yield _fault(
            chunk,
            f"is queued for pool {chunk.pool_id} as of batch number {chunk.batch_seq}, but"
            f" {batch.id} is number {place[1]} of pool {place[0]}",
            _BY_HAND,
            statement.update("chunks", key, pool_id=place[0], batch_seq=place[1]),
        )
    if chunk.is_open and batch.sealed_ms is not None:
        yield _fault(
            chunk,
            f"is {chunk.state}, but {batch.id} takes no results any more",
            _BY_HAND,
            statement.update("chunks", key, state="done"),
        )


def _coverage_faults(
    batch: BatchFacts,
    held: Sequence[tuple[ChunkFacts, list[Range]]],
    claims: npt.NDArray[np.uint16],
    left: Mask,
) -> Iterator[Fault]:
    """Check open chunks (`claims`: how many hold each line) against what is `left` to do."""
    twice = np.flatnonzero(claims > 1)
    if twice.size:
        yield Fault(
            subject=batch.id,
            what=f"{spoken(twice)} are in two chunks at once",
            mend="Nothing is lost, since the first result of a line counts: they only run twice. "
            "Let it run on.",
        )
    nowhere = np.flatnonzero((claims == 0) & left)
    for chunk, ranges in reversed(held):
        lines = np.intersect1d(nowhere, _ordinals(ranges))
        if lines.size:
            nowhere = np.setdiff1d(nowhere, lines)
            yield _lost(batch, chunk, pack(lines.tolist()))
    if nowhere.size:
        yield Fault(
            subject=batch.id,
            what=f"{spoken(nowhere)} were cut, have no result, and are in no chunk: they never run",
            mend="Cancel it: what is finished is in its output file, and its error file names the "
            "lines to submit again.",
        )


def _ordinals(ranges: Sequence[Range]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(first, first + count) for first, count in ranges])


def _lost(batch: BatchFacts, chunk: ChunkFacts, lines: list[Range]) -> Fault:
    packed = np.array(lines, "<u4").tobytes()
    return Fault(
        subject=batch.id,
        what=f"{spoken(_ordinals(lines))} have no result, but their chunk {chunk.id} is done: they"
        " never run",
        mend=_BY_HAND + " They are handed out again then.",
        # A lease that is over: the next reconcile dispatches it.
        sql=statement.update(
            "chunks",
            {"id": chunk.id},
            state="out",
            lease_until_ms=0,
            lines=packed,
            first_line=lines[0][0],
            line_count=count_lines(lines),
        ),
    )


def attempt_faults(
    batch: BatchFacts, chunks: Sequence[ChunkFacts], attempts: Sequence[AttemptFacts]
) -> Iterator[Fault]:
    """Check who works on a batch: one attempt a chunk at most, of its present dispatch."""
    by_id = {chunk.id: chunk for chunk in chunks}
    open_ones = Counter(each.chunk_id for each in attempts if each.closed_ms is None)
    for attempt in attempts:
        chunk = by_id.get(attempt.chunk_id)
        why = ""
        if chunk is None:
            why = f"is of chunk {attempt.chunk_id}, which is not one of {batch.id}"
        elif attempt.number > chunk.attempts:
            yield Fault(
                subject=attempt.token,
                what=f"is number {attempt.number}, but its chunk counts {chunk.attempts}",
                mend=_BY_HAND,
                sql=statement.update("chunks", {"id": chunk.id}, attempts=attempt.number),
            )
        if attempt.closed_ms is None and chunk is not None:
            why = _why_not_open(batch, chunk, attempt, open_ones[chunk.id])
        if why:
            yield _attempt_fault(attempt, why)


def _why_not_open(batch: BatchFacts, chunk: ChunkFacts, attempt: AttemptFacts, alike: int) -> str:
    if batch.sealed_ms is not None:
        return f"is open, but {batch.id} takes no results any more"
    if chunk.state != "out":
        return f"is open, but its chunk {chunk.id} is {chunk.state}"
    if attempt.dispatch != chunk.dispatch:
        return f"is open under dispatch {attempt.dispatch}, but its chunk has {chunk.dispatch}"
    if alike > 1:
        return f"is one of {alike} open attempts of chunk {chunk.id}"
    return ""


def _attempt_fault(attempt: AttemptFacts, why: str) -> Fault:
    close = statement.update(
        "attempts",
        {"token": attempt.token},
        closed_ms=statement.Sql("opened_ms"),
        outcome="lost",
    )
    return Fault(
        subject=attempt.token,
        what=why,
        mend=_BY_HAND + " What its executor still sends counts as before.",
        sql=close
        if attempt.closed_ms is None
        else statement.delete("attempts", token=attempt.token),
    )


def _fault(chunk: ChunkFacts, what: str, mend: str, sql: str) -> Fault:
    return Fault(subject=chunk.id, what=what, mend=mend, sql=sql)
