"""First durable result wins: one bit a line, in blocks of 4,096 lines.

A batch's lines are ordinals 0..n-1, requests only. Block b holds the ordinals
b * 4096 .. b * 4096 + 4095 as 512 bytes, bit i of byte k being line 8 * k + i; a set bit means
that the line has its durable outcome. A range is (first ordinal, count), count >= 1; a list of
ranges is sorted, and neither overlaps nor touches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.kit.wire.frames import FAILED_FLAG, NEVER_RAN_FLAG

BLOCK_LINES = 4096
BLOCK_BYTES = BLOCK_LINES // 8
EMPTY_BLOCK = bytes(BLOCK_BYTES)
COUNTED = (
    "completed",
    "failed",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "reasoning_tokens",
)
"""Columns of a batch that are sums over its results, by their names in `Tally`."""

Lines = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]
#: Rows of `services.kit.wire.frames.RESULT_RECORD`.
Records = npt.NDArray[np.void]
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of lines and sums of tokens, of winners only, so that adding them never counts twice.

    `never_ran` lines (cancelled, expired) are in neither `completed` nor `failed`.
    """

    completed: int = 0
    failed: int = 0
    never_ran: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def lines(self) -> int:
        """Lines with an outcome, of whatever kind."""
        return self.completed + self.failed + self.never_ran

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            completed=self.completed + other.completed,
            failed=self.failed + other.failed,
            never_ran=self.never_ran + other.never_ran,
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class Admission:
    """What a set of results changes.

    `blocks`: the blocks that changed, whole, by number. `winners`: one flag a record, in their
    order. `tally`: of the winners.
    """

    blocks: Mapping[int, bytes]
    winners: Mask
    tally: Tally


def admit(bits: bytes, lines_in_block: Lines) -> tuple[bytes, Mask]:
    """Sets the bits of these lines (0..4095) and tells which of them were the first.

    Returns the new 512 bytes and a flag for each line: true where its bit was 0 and no earlier
    entry of the same call names it. Repeating the call with the new bits has no winner. Raises
    ValueError when `bits` is no block or a line lies outside it.
    """
    if len(bits) != BLOCK_BYTES:
        raise ValueError(f"a block has {BLOCK_BYTES} bytes, not {len(bits)}")
    lines = np.asarray(lines_in_block)
    winners = np.zeros(lines.size, dtype=np.bool_)
    if not lines.size:
        return bytes(bits), winners
    if int(lines.min()) < 0 or int(lines.max()) >= BLOCK_LINES:
        raise ValueError(f"a line outside its block of {BLOCK_LINES}")
    done = _unpack_bits(bits)
    winners[np.unique(lines, return_index=True)[1]] = True
    winners &= ~done[lines]
    done[lines] = True
    return np.packbits(done, bitorder="little").tobytes(), winners


def blocks_of(lines: Lines) -> list[int]:
    """The numbers of the blocks that hold these ordinals, ascending: the order to lock them in."""
    numbers: list[int] = np.unique(np.asarray(lines) // BLOCK_LINES).tolist()
    return numbers


def admit_results(blocks: Mapping[int, bytes], records: Records, *, total: int) -> Admission:
    """Admits result records of any of a batch's lines, over as many blocks as they touch.

    `blocks` must hold each block of `blocks_of(records["line"])` that exists; a missing one is
    empty. `total` is the batch's number of lines. Raises ValueError for a line beyond it.
    """
    lines = records["line"]
    winners = np.zeros(lines.size, dtype=np.bool_)
    if not lines.size:
        return Admission({}, winners, Tally())
    if int(lines.max()) >= total:
        raise ValueError(f"line {int(lines.max())} of a batch of {total} lines")
    changed: dict[int, bytes] = {}
    numbers = lines // BLOCK_LINES
    for number in blocks_of(lines):
        here = np.flatnonzero(numbers == number)
        before = blocks.get(number, EMPTY_BLOCK)
        after, won = admit(before, lines[here] - np.uint32(number * BLOCK_LINES))
        winners[here] = won
        if after != before:
            changed[number] = after
    return Admission(changed, winners, tally(records[winners]))


def tally(records: Records) -> Tally:
    """Counts and token sums of these records; the caller passes winners only."""
    flags = records["flags"]
    never_ran = (flags & NEVER_RAN_FLAG) != 0
    failed = ((flags & FAILED_FLAG) != 0) & ~never_ran
    ran_badly, ran_not = int(failed.sum()), int(never_ran.sum())

    def total(column: str) -> int:
        return int(records[column].sum(dtype=np.uint64))

    return Tally(
        completed=len(records) - ran_badly - ran_not,
        failed=ran_badly,
        never_ran=ran_not,
        input_tokens=total("input_tokens"),
        cached_tokens=total("cached_tokens"),
        output_tokens=total("output_tokens"),
        reasoning_tokens=total("reasoning_tokens"),
    )


def remaining(bits: bytes, first: int, count: int) -> list[Range]:
    """The parts of the block's lines first .. first+count-1 (0..4095) without an outcome."""
    if first < 0 or count < 0 or first + count > BLOCK_LINES:
        raise ValueError(f"lines {first}+{count} lie outside a block of {BLOCK_LINES}")
    undone = np.flatnonzero(~_unpack_bits(bits)[first : first + count])
    return pack((undone + first).astype(np.uint32))


def remaining_ranges(blocks: Mapping[int, bytes], ranges: Iterable[Range]) -> list[Range]:
    """The parts of `ranges` (ordinals of the batch) without an outcome; a missing block is empty.

    This is what is left to do of a chunk, and, over (0, total), what never ran at the seal.
    """
    left: list[Range] = []
    for number, first, count in _by_block(ranges):
        bits = blocks.get(number, EMPTY_BLOCK)
        base = number * BLOCK_LINES
        left.extend((base + start, n) for start, n in remaining(bits, first, count))
    return normalise(left)


# --- ranges ------------------------------------------------------------------------------------


def pack(lines: Lines | Sequence[int]) -> list[Range]:
    """Ranges of ascending, distinct ordinals. Raises ValueError when they are not."""
    ordinals = np.asarray(lines, dtype=np.int64)
    if not ordinals.size:
        return []
    steps = np.diff(ordinals)
    if steps.size and int(steps.min()) < 1:
        raise ValueError("ordinals must ascend and be distinct")
    starts = np.concatenate(([0], np.flatnonzero(steps != 1) + 1))
    counts = np.diff(np.concatenate((starts, [ordinals.size])))
    return list(zip(ordinals[starts].tolist(), counts.tolist(), strict=True))


def unpack(ranges: Iterable[Range]) -> Lines:
    """Every ordinal of the ranges, in their order, as uint32."""
    parts = [np.arange(first, first + count, dtype=np.uint32) for first, count in ranges]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)


def count_lines(ranges: Iterable[Range]) -> int:
    """How many lines the ranges hold."""
    return sum(count for _, count in ranges)


def normalise(ranges: Iterable[Range]) -> list[Range]:
    """Sorted, merged where they overlap or touch, without empty ones."""
    merged: list[Range] = []
    for first, count in sorted(r for r in ranges if r[1] > 0):
        if merged and first <= merged[-1][0] + merged[-1][1]:
            start, held = merged[-1]
            merged[-1] = (start, max(held, first + count - start))
        else:
            merged.append((first, count))
    return merged


def intersect(left: Iterable[Range], right: Iterable[Range]) -> list[Range]:
    """The lines in both."""
    ours, theirs = normalise(left), normalise(right)
    both: list[Range] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        start = max(ours[i][0], theirs[j][0])
        our_end, their_end = sum(ours[i]), sum(theirs[j])
        end = min(our_end, their_end)
        if start < end:
            both.append((start, end - start))
        if our_end <= their_end:
            i += 1
        else:
            j += 1
    return both


def subtract(left: Iterable[Range], right: Iterable[Range]) -> list[Range]:
    """The lines of `left` that are not in `right`."""
    rest: list[Range] = []
    holes = normalise(right)
    j = 0
    for first, count in normalise(left):
        start, end = first, first + count
        while j < len(holes) and sum(holes[j]) <= start:
            j += 1
        k = j
        while k < len(holes) and holes[k][0] < end:
            if holes[k][0] > start:
                rest.append((start, holes[k][0] - start))
            start = sum(holes[k])
            k += 1
        if start < end:
            rest.append((start, end - start))
    return rest


def _by_block(ranges: Iterable[Range]) -> Iterator[tuple[int, int, int]]:
    """The ranges cut at block borders: (block number, first line in the block, count)."""
    for first, count in ranges:
        line, end = first, first + count
        while line < end:
            number, start = divmod(line, BLOCK_LINES)
            here = min(end - line, BLOCK_LINES - start)
            yield number, start, here
            line += here


def _unpack_bits(bits: bytes) -> npt.NDArray[np.bool_]:
    if len(bits) != BLOCK_BYTES:
        raise ValueError(f"a block has {BLOCK_BYTES} bytes, not {len(bits)}")
    flags: npt.NDArray[Any] = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return flags.view(np.bool_)
