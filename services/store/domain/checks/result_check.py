"""Whether bits, results and counts of a batch that is not ended say the same.

The results decide: they are what was acknowledged, and what end files are made of.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.kit.wire.frames import RESULT_RECORD
from services.store.domain.checks import statement
from services.store.domain.checks.batch_check import BatchFacts
from services.store.domain.checks.fault import Fault, spoken
from services.store.domain.results import BLOCK_BYTES, BLOCK_LINES, COUNTED, Tally, tally

Mask = npt.NDArray[np.bool_]

_BY_HAND: Final = "Stop nightshift, run the statement, and check again."


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFacts:
    """A segment's row without its payload; `size` is the payload's in bytes, None in a blob."""

    id: int
    version: int
    first_line: int
    last_line: int
    records: bytes
    size: int | None
    blob: str | None


class Results:
    """The results of one batch, segment by segment. Memory: 12 bytes a line."""

    def __init__(self, batch: BatchFacts) -> None:
        """Expect the segments of a batch."""
        self._batch = batch
        self._lines: list[npt.NDArray[np.uint32]] = []
        self._segments: list[tuple[int, int]] = []
        self._tally = Tally()

    def add(self, segment: SegmentFacts) -> Iterator[Fault]:
        """Take the next segment; where it cannot be read, its lines count as without a result."""
        if len(segment.records) % RESULT_RECORD.itemsize or not segment.records:
            yield self._broken(segment, "its records are cut off")
            return
        records = np.frombuffer(segment.records, RESULT_RECORD)
        lines = records["line"]
        if int(lines.max()) >= self._batch.lines_total:
            yield self._broken(segment, f"it holds line {int(lines.max())}, beyond the batch")
            return
        if segment.size is not None and end_of(records) > segment.size:
            yield self._broken(segment, "its records point beyond its payload")
            return
        ends = int(lines.min()), int(lines.max())
        if (segment.first_line, segment.last_line) != ends:
            yield Fault(
                subject=self._batch.id,
                what=f"segment {segment.id} says lines {segment.first_line} to"
                f" {segment.last_line}, and holds {ends[0]} to {ends[1]}",
                mend=_BY_HAND,
                sql=statement.update(
                    "segments", {"id": segment.id}, first_line=ends[0], last_line=ends[1]
                ),
            )
        if segment.version > self._batch.version:
            yield Fault(
                subject=self._batch.id,
                what=f"segment {segment.id} is of version {segment.version}, later than the batch",
                mend=_BY_HAND,
                sql=self._batch.update(version=segment.version),
            )
        self._lines.append(lines)
        self._segments.append((segment.id, len(lines)))
        self._tally += tally(records)

    def _broken(self, segment: SegmentFacts, why: str) -> Fault:
        return Fault(
            subject=self._batch.id,
            what=f"segment {segment.id} of results is damaged: {why}",
            mend="Stop nightshift, forget these results by the statement, and check again: it then "
            "says how to let their lines run again.",
            sql=statement.delete("segments", id=segment.id),
        )

    def done(self) -> Mask:
        """Return a flag for each line of the batch: whether it has a result."""
        done = np.zeros(self._batch.lines_total, np.bool_)
        for lines in self._lines:
            done[lines] = True
        return done

    def faults(self, blocks: Mapping[int, bytes]) -> Iterator[Fault]:
        """Compare all that was taken with the batch's bit blocks and counts."""
        done = self.done()
        twice = list(self._twice())
        yield from twice
        yield from bit_faults(self._batch, blocks, done)
        if not twice:
            yield from self._count_faults()
        if self._batch.status == "in_progress" and len(done) and done.all():
            yield Fault(
                subject=self._batch.id,
                what="has a result for every line, and is not sealed",
                mend="Cancel it: it ends as cancelled, with every result in its files.",
            )

    def _twice(self) -> Iterator[Fault]:
        if not self._lines:
            return
        lines = np.concatenate(self._lines)
        numbers = np.repeat(
            [number for number, _ in self._segments], [count for _, count in self._segments]
        )
        order = np.argsort(lines, kind="stable")
        again = np.flatnonzero(lines[order][1:] == lines[order][:-1]) + 1
        later = np.unique(numbers[order][again])
        for number in later.tolist():
            double = lines[order][again][numbers[order][again] == number]
            yield Fault(
                subject=self._batch.id,
                what=f"{spoken(double)} have a second result, in segment {number}; its end files"
                " cannot be written",
                mend="Stop nightshift, forget that segment by the statement, and check again: it "
                "then says how to let its other lines run again.",
                sql=statement.delete("segments", id=number),
            )

    def _count_faults(self) -> Iterator[Fault]:
        batch, found = self._batch, self._tally
        right = {"lines_done": found.lines} | {name: getattr(found, name) for name in COUNTED}
        wrong = {name: n for name, n in right.items() if getattr(batch, name) != n}
        if wrong:
            said = ", ".join(f"{name} is {getattr(batch, name)}" for name in wrong)
            yield Fault(
                subject=batch.id,
                what=f"{said}; its results come to {', '.join(map(str, wrong.values()))}",
                mend=_BY_HAND,
                sql=batch.update(**wrong),
            )


def end_of(records: npt.NDArray[Any]) -> int:
    """Return how many bytes of payload these RESULT_RECORDs need."""
    return int((records["offset"].astype(np.int64) + records["length"]).max(initial=0))


def bit_faults(batch: BatchFacts, blocks: Mapping[int, bytes], done: Mask) -> Iterator[Fault]:
    """Compare bit blocks with the lines that have a result."""
    needed = -(-batch.lines_total // BLOCK_LINES)
    for number in sorted({*blocks, *range(needed)}):
        first = number * BLOCK_LINES
        here = done[first : first + BLOCK_LINES]
        right = np.zeros(BLOCK_LINES, np.bool_)
        right[: len(here)] = here
        packed = np.packbits(right, bitorder="little").tobytes()
        bits = blocks.get(number)
        if bits == packed or (bits is None and not right.any()):
            continue
        yield Fault(
            subject=batch.id,
            what=_bit_trouble(number, bits, right),
            mend=_BY_HAND + " Lines that are not marked any more run again.",
            sql=statement.insert(
                "bit_blocks",
                {"batch_id": batch.id, "block": number},
                project_id=batch.project_id,
                bits=packed,
            ),
        )


def _bit_trouble(number: int, bits: bytes | None, right: Mask) -> str:
    first = number * BLOCK_LINES
    if bits is None:
        return f"{spoken(np.flatnonzero(right) + first)} have a result, and no block of bits"
    if len(bits) != BLOCK_BYTES:
        return f"block {number} of its bits has {len(bits)} bytes instead of {BLOCK_BYTES}"
    marked = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").astype(np.bool_)
    troubles = []
    for wrong, trouble in (
        (marked & ~right, "marked as done without a result"),
        (right & ~marked, "with a result and not marked as done"),
    ):
        if wrong.any():
            troubles.append(f"{spoken(np.flatnonzero(wrong) + first)} {trouble}")
    return f"has {' and '.join(troubles)}"
