"""Pulls chunks while there is room for their lines."""

import asyncio
from collections.abc import Callable
from typing import Final

from services.executor.attempts import Attempts
from services.executor.chunks.endings import Endings
from services.executor.chunks.keep_alive import BEAT_SECONDS
from services.executor.chunks.opener import Opener
from services.executor.chunks.store_reach import Reach
from services.executor.lines.retry import Backoff
from services.executor.presence.beats import Presence
from services.kit.messages.bus import ACK_WAIT_SECONDS, Bus, BusFault, Delivery, Puller
from services.kit.process.clock import Clock
from services.kit.process.log import get_logger
from services.kit.wire.ids import PoolId

_log = get_logger(__name__)

MOST_CHUNKS: Final = 8
"""Chunks asked for in one fetch."""
ALONE_DELAY_SECONDS: Final = 1.0
"""Others may take what arrives while suspects have the engine to themselves."""


class ChunkPuller:
    """Turns room into attempts with lines."""

    def __init__(
        self,
        *,
        bus: Bus,
        pool_id: PoolId,
        attempts: Attempts,
        endings: Endings,
        opener: Opener,
        presence: Presence,
        reach: Reach,
        clock: Clock,
        chance: Callable[[], float],
    ) -> None:
        """Make a puller that is not bound to its consumer yet."""
        self._bus = bus
        self._reach = reach
        self._pool_id = pool_id
        self._attempts = attempts
        self._endings = endings
        self._opener = opener
        self._presence = presence
        self._clock = clock
        self._chance = chance
        self._puller: Puller | None = None
        self._wake = asyncio.Event()
        self._stopped = False

    def wake(self) -> None:
        """Look again whether there is room."""
        self._wake.set()

    def stop(self) -> None:
        """Pull nothing more; what a pending fetch still brings is given back."""
        self._stopped = True
        self._wake.set()

    async def run(self) -> None:
        """Pull until stopped or cancelled; the client may swallow a cancel while it fetches."""
        backoff = Backoff(0.05, 0.5, self._chance)
        while not self._stopped:
            try:
                await self.run_once()
                backoff.reset()
            except BusFault as fault:
                # Stream or consumer may be gone, which the scheduler makes again, or have no leader
                # for some seconds.
                _log.debug("fetch_failed", error=str(fault))
                await asyncio.sleep(backoff.next_seconds())

    async def run_once(self) -> int:
        """Fetch once if there is room, else wait for some; return the number of deliveries.

        Raises:
            BusFault: the bus does not answer, or the consumer is not there.
        """
        await self._reach.wait()
        self._wake.clear()
        wanted = self._chunks_wanted()
        if not wanted:
            await self._wake.wait()
            return 0
        if self._puller is None:
            self._puller = await self._bus.pull_from(self._pool_id)
        deliveries = await self._puller.fetch(wanted)
        for delivery in deliveries:
            self._take(delivery)
        return len(deliveries)

    def _chunks_wanted(self) -> int:
        if self._stopped or not self._presence.ready or self._attempts.first_alone() is not None:
            return 0
        room = self._presence.room()
        return room.chunks_wanted(
            self._attempts.held_lines, self._presence.chunk_lines, MOST_CHUNKS
        )

    def _take(self, delivery: Delivery) -> None:
        now = self._clock.monotonic()
        ours = self._attempts.held(delivery.dispatch)
        if ours is not None and ours.token and now - ours.answered_at <= ACK_WAIT_SECONDS:
            # It was left to the broker, or the broker lost its memory: its lines run on.
            ours.delivery, ours.kept_at, ours.released = delivery, now, False
            return
        alone = self._attempts.first_alone()
        attempt = self._attempts.add(delivery, now)
        if self._stopped or not self._presence.ready or self._reach.is_lost:
            self._endings.refuse(attempt, 0.0)
        elif ours is not None:
            # Opened now, it would be taken from ourselves; the next beat tells whether it is ours.
            self._endings.refuse(attempt, BEAT_SECONDS)
        elif alone is not None:
            self._endings.refuse(attempt, ALONE_DELAY_SECONDS)
        else:
            self._opener.open(attempt)
