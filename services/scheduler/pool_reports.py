"""Tells the store what is heard of the pools' executors, for people who ask why a batch waits."""

from collections.abc import Iterable
from typing import Final

from services.kit.process.clock import Clock
from services.kit.wire.ids import PoolId
from services.scheduler.domain.report import PoolReport, differs, report_of
from services.scheduler.registry import Registry
from services.scheduler.work_client import WorkClient

REPEAT_SECONDS: Final = 10.0
"""How often the same is said again; the store believes it for 30 s."""


class PoolReporter:
    """Says what has changed at once, and all of it every now and then."""

    def __init__(self, client: WorkClient, registry: Registry, clock: Clock) -> None:
        """Say nothing yet.

        Args:
            client: calls the store.
            registry: the executors alive.
            clock: measures when it is time to repeat.
        """
        self._client = client
        self._registry = registry
        self._clock = clock
        self._said: dict[PoolId, PoolReport] = {}
        self._term = 0
        self._said_at = 0.0

    async def run_once(self, term: int, pool_ids: Iterable[PoolId]) -> bool:
        """Report these pools, and those that executors name, if there is reason to; tell whether.

        Raises:
            NightshiftError: the store does not take it; it is said again next time.
        """
        alive = self._registry.alive()
        reports = {
            pool_id: report_of(pool_id, alive.get(pool_id, ())) for pool_id in {*pool_ids, *alive}
        }
        now = self._clock.monotonic()
        due = term != self._term or now - self._said_at >= REPEAT_SECONDS
        if not reports or not (due or differs(self._said, reports)):
            return False
        await self._client.report_pools(term, list(reports.values()))
        self._said, self._term, self._said_at = reports, term, now
        return True
