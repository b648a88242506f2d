"""Count of what is published and not yet opened: room that is already spoken for."""

from dataclasses import dataclass, field
from typing import Final

from services.kit.wire.ids import ChunkId, PoolId

FORGET_SECONDS: Final = 2.0
"""A dispatch that the broker has delivered this long ago and nobody told of counts no more."""

DispatchKey = tuple[ChunkId, int]
"""A chunk and the number of its dispatch."""


@dataclass(slots=True)
class _Pool:
    # In order of publication.
    known: dict[DispatchKey, tuple[int, float]] = field(default_factory=dict)
    lines: int = 0
    # Messages that the broker holds and that were published by a former leader.
    foreign: int = 0


class Unopened:
    """A ledger by pool. Told late or not at all of an opening, it is corrected from the broker."""

    def __init__(self) -> None:
        """Start without any."""
        self._pools: dict[PoolId, _Pool] = {}

    def add(self, pool_id: PoolId, key: DispatchKey, *, lines: int, now: float) -> None:
        """Note a dispatch before it is published; `now` in seconds of a clock that never jumps."""
        pool = self._pools.setdefault(pool_id, _Pool())
        self._drop(pool, key)
        pool.known[key] = (lines, now)
        pool.lines += lines

    def opened(self, pool_id: PoolId, key: DispatchKey) -> None:
        """Note that an executor opened or dropped it; unknown ones are nobody's concern."""
        if pool_id in self._pools:
            self._drop(self._pools[pool_id], key)

    def correct(self, pool_id: PoolId, pending: int, now: float) -> None:
        """Hold the count against the broker's.

        Args:
            pool_id: whose consumer was asked.
            pending: messages published and not yet delivered.
            now: when it was asked.
        """
        pool = self._pools.setdefault(pool_id, _Pool())
        # The broker delivers in order of publication, so that the oldest are those delivered.
        delivered = max(0, len(pool.known) - pending)
        for key, (_, published) in list(pool.known.items())[:delivered]:
            if now - published > FORGET_SECONDS:
                self._drop(pool, key)
        pool.foreign = max(0, pending - len(pool.known))

    def lines(self, pool_id: PoolId, chunk_lines: int) -> int:
        """Return the lines unopened; messages of a former leader count as `chunk_lines` each."""
        pool = self._pools.get(pool_id)
        return 0 if pool is None else pool.lines + pool.foreign * chunk_lines

    def clear(self) -> None:
        """Forget all, as a scheduler that no longer leads does."""
        self._pools.clear()

    @staticmethod
    def _drop(pool: _Pool, key: DispatchKey) -> None:
        found = pool.known.pop(key, None)
        if found is not None:
            pool.lines -= found[0]
