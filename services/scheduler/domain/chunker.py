"""How much of a batch goes into its next chunk."""

from dataclasses import dataclass
from typing import Final

from services.kit.wire.ids import BatchId, PoolId
from services.scheduler.domain.capacity import Capacity
from services.scheduler.domain.window import WindowBatch

CHUNK_SECONDS: Final = 15.0
"""Time that a chunk is to take on the pool's slowest executor."""
MAX_CHUNK_LINES: Final = 512
"""Larger ones gain nothing, even with an engine that answers at once (measured)."""
MAX_CHUNK_BYTES: Final = 8 * 1024 * 1024
"""Input of a chunk; a single longer line is a chunk of its own."""

# A chunk that is done within this time is never made smaller: it is no straggler, its results come
# soon, and small chunks cost the fast case most.
_QUICK_SECONDS: Final = 1.0
_HEAD_SHARE: Final = 4
# Nor is any chunk cut below this part of a full one, but for a batch's last.
_CRUMBS: Final = 8
_TAIL_SHARES: Final = 2


@dataclass(frozen=True, slots=True)
class Cut:
    """One chunk to cut, from where the batch is cut up to.

    Attributes:
        pool_id: for whom, of a batch that has lines for several.
        max_lines: at most this many lines.
        max_bytes: at most this much input, but at least one line.
    """

    pool_id: PoolId
    batch_id: BatchId
    max_lines: int
    max_bytes: int


def full_chunk_lines(capacity: Capacity) -> int:
    """Return the size of a chunk from the middle of a large batch: 1 to `MAX_CHUNK_LINES`."""
    if capacity.lines_per_second <= 0:
        return min(MAX_CHUNK_LINES, max(1, capacity.seats // 4))
    # Compared before it is made an integer: a rate may be infinite.
    return max(1, int(min(MAX_CHUNK_LINES, capacity.lines_per_second * CHUNK_SECONDS)))


def next_chunk(batch: WindowBatch, capacity: Capacity) -> Cut:
    """Return the next cut of a batch that has lines left.

    Smaller at the batch's head, so that first results come soon; smaller at its tail, so that no
    straggler holds the whole of it; and never a whole batch for one executor of several, but for
    batches so small that their lines fit into a quarter of an engine's seats.
    """
    full = full_chunk_lines(capacity)
    quick = int(min(full, capacity.lines_per_second * _QUICK_SECONDS))
    least = max(1, quick, full // _CRUMBS)
    lines = full
    if batch.lines_cut < full:
        lines = min(lines, max(least, full // _HEAD_SHARE))
    if capacity.executors > 1:
        tail = _up(batch.lines_left, _TAIL_SHARES * capacity.executors)
        share = _up(batch.lines_total, capacity.executors)
        lines = min(lines, max(least, tail), max(1, capacity.seats // 4, share))
    by_bytes = max(1, MAX_CHUNK_BYTES // max(1, batch.line_bytes_mean))
    return Cut(*batch.key, min(lines, by_bytes, batch.lines_left), MAX_CHUNK_BYTES)


def never_short(batch: WindowBatch) -> bool:
    """Tell whether no cut of the batch can come out shorter than asked for."""
    if batch.several_models:
        return False
    # By its bytes. The mean is rounded, so that the sum may be a little higher than it says.
    return batch.lines_total * (batch.line_bytes_mean + 1) <= MAX_CHUNK_BYTES


def _up(lines: int, shares: int) -> int:
    return -(-lines // shares)
