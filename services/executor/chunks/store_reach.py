"""Whether the store answers this executor; while it does not, others may run what waits."""

import asyncio
from collections.abc import Callable
from typing import Final

from services.executor.lines.retry import Backoff
from services.executor.store_client import StoreClient
from services.kit.calls.rpc import CallFault
from services.kit.process.log import get_logger

_log = get_logger(__name__)

SHORTEST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 2.0
"""Wait between two looks, at most; each look itself is bounded by its deadline."""


class Reach:
    """Known from what calls came to; looked after by itself once one has failed.

    An executor that is cut off from the store and not from the bus would else take messages for
    as long as its calls wait for their deadlines, again and again.
    """

    def __init__(self, store: StoreClient, chance: Callable[[], float]) -> None:
        """Take the store for there; `chance` gives random numbers in [0, 1), for jitter."""
        self._store = store
        self._backoff = Backoff(SHORTEST_SECONDS, LONGEST_SECONDS, chance)
        self._lost = False

    @property
    def is_lost(self) -> bool:
        """Whether the last call failed."""
        return self._lost

    def lost(self) -> None:
        """A call got no answer."""
        if not self._lost:
            _log.warning("store_lost")
        self._lost = True

    def answered(self) -> None:
        """A call was answered that may work while others do not."""
        if self._lost:
            _log.info("store_found")
        self._lost = False

    def opened(self) -> None:
        """An attempt was opened, or refused for a reason: the store does its work."""
        self.answered()
        self._backoff.reset()

    async def wait(self) -> None:
        """Return once the store answers; it is asked ever more slowly."""
        while self._lost:
            await asyncio.sleep(self._backoff.next_seconds())
            try:
                await self._store.beat([])
            except CallFault:
                continue
            # The wait stays as long as it has grown: what failed may fail again.
            self.answered()
