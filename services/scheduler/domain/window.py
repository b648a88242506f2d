"""The sliding window: the batches that may run now, by pool, in order of creation."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from services.kit.wire.ids import BatchId, PoolId

BATCHES_PER_POOL: Final = 1_000
"""Batches of a pool that are held; the store keeps the rest in order."""


Key = tuple[PoolId, BatchId]
"""A batch in the window: one of several models is there once for each of their pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBatch:
    """A batch with lines left to cut for a pool; lines are that pool's own.

    Attributes:
        seq: order of creation over all projects.
        lines_cut: lines already in chunks; the next chunk begins here.
        expires_at_ms: milliseconds since the epoch, by the store's clock.
        line_bytes_mean: mean input of a line.
        several_models: its lines name several, and a chunk is of one.
    """

    batch_id: BatchId
    seq: int
    pool_id: PoolId
    lines_total: int
    lines_cut: int
    expires_at_ms: int
    line_bytes_mean: int
    several_models: bool = False

    @property
    def key(self) -> Key:
        """What names it in the window."""
        return self.pool_id, self.batch_id

    @property
    def lines_left(self) -> int:
        """Lines that are in no chunk yet."""
        return max(0, self.lines_total - self.lines_cut)

    def after(self, lines: int) -> "WindowBatch":
        """Return the same batch with `lines` more of it cut."""
        return replace(self, lines_cut=self.lines_cut + lines)


@dataclass(frozen=True, slots=True)
class Window:
    """What the store last said, less what was cut since.

    Attributes:
        pools: open batches by pool, each list ascending by `seq` and at most `BATCHES_PER_POOL`.
        full: pools of which the store has more batches than the window holds.
    """

    pools: Mapping[PoolId, tuple[WindowBatch, ...]]
    full: frozenset[PoolId] = frozenset()

    @classmethod
    def of(cls, batches: Iterable[WindowBatch], most: int = BATCHES_PER_POOL) -> "Window":
        """Return the window of the store's answer, which held at most `most` of each pool."""
        found: dict[PoolId, list[WindowBatch]] = {}
        for batch in sorted(batches, key=lambda each: each.seq):
            found.setdefault(batch.pool_id, []).append(batch)
        return cls(
            {pool_id: tuple(each[:most]) for pool_id, each in found.items()},
            frozenset(pool_id for pool_id, each in found.items() if len(each) >= most),
        )

    def open_batches(self, pool_id: PoolId, now_ms: int) -> tuple[WindowBatch, ...]:
        """Return a pool's batches with lines left and time left, ascending by `seq`."""
        return tuple(
            batch
            for batch in self.pools.get(pool_id, ())
            if batch.lines_left and now_ms < batch.expires_at_ms
        )

    def __len__(self) -> int:
        """Return how many batches are held."""
        return sum(map(len, self.pools.values()))

    def __contains__(self, batch_id: object) -> bool:
        """Tell whether a batch is held."""
        return any(batch.batch_id == batch_id for each in self.pools.values() for batch in each)

    def lacks(self, pool_id: PoolId) -> bool:
        """Tell whether the store has lines for a pool that the window has run out of."""
        return pool_id in self.full and not self.pools.get(pool_id)

    def advanced(self, cut: Mapping[Key, int]) -> "Window":
        """Return the window after `cut` lines of batches went into chunks of a pool."""
        return Window(
            {
                pool_id: tuple(
                    moved
                    for batch in batches
                    if (moved := _moved(batch, cut.get(batch.key, 0))).lines_left
                )
                for pool_id, batches in self.pools.items()
            },
            self.full,
        )

    def without(self, batch_ids: Iterable[BatchId]) -> "Window":
        """Return the window without some batches, in whatever pool."""
        gone = frozenset(batch_ids)
        return self._only(lambda batch: batch.batch_id not in gone)

    def without_keys(self, keys: Iterable[Key]) -> "Window":
        """Return the window without some batches of a pool each."""
        gone = frozenset(keys)
        return self._only(lambda batch: batch.key not in gone)

    def _only(self, stays: Callable[[WindowBatch], bool]) -> "Window":
        return Window(
            {pool_id: tuple(filter(stays, batches)) for pool_id, batches in self.pools.items()},
            self.full,
        )


def _moved(batch: WindowBatch, lines: int) -> WindowBatch:
    return batch.after(lines) if lines else batch
