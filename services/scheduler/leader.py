"""Leadership: a lease in the store, under a term that travels on every call."""

from collections.abc import Callable
from typing import Final

import prometheus_client

from services.kit.process.clock import Clock
from services.kit.process.log import get_logger
from services.kit.wire.errors import NightshiftError
from services.scheduler.work_client import WorkClient

_log = get_logger(__name__)

TTL_SECONDS: Final = 3.0
"""How long a leader that says nothing more is waited for."""
RENEW_SECONDS: Final = 1.0

_LEADS = prometheus_client.Gauge(
    "nightshift_scheduler_leader", "Whether this scheduler leads (1) or stands by (0)."
)


class Leader:
    """One scheduler's leadership; it is over by itself when it could not be renewed in time."""

    def __init__(
        self,
        client: WorkClient,
        *,
        holder: str,
        clock: Clock,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Stand by.

        Args:
            client: calls the store.
            holder: this scheduler's name, unique in the fleet.
            clock: measures the lease.
            on_change: called after leadership was won or lost.
        """
        self._client = client
        self._holder = holder
        self._clock = clock
        self._on_change = on_change
        self._term: int | None = None
        self._until = 0.0
        # When the store last said that a term is over.
        self._lost_at = float("-inf")

    @property
    def term(self) -> int | None:
        """Return the term while this scheduler leads; None else."""
        if self._term is not None and self._clock.monotonic() >= self._until:
            self._lose(self._term)
        return self._term

    def leads(self, term: int) -> bool:
        """Tell whether this scheduler leads in `term`, and still does."""
        return self.term == term

    def lost(self, term: int) -> None:
        """Stop leading in `term`, which the store says is over; a later one stays."""
        if self._term == term:
            self._lost_at = self._clock.monotonic()
            self._lose(term)

    async def run_once(self) -> bool:
        """Take or renew the leadership; return whether this scheduler leads now."""
        # The lease runs from some moment after this one, so that it is never overestimated.
        asked = self._clock.monotonic()
        try:
            answer = await self._client.lead(self._holder, TTL_SECONDS)
        except NightshiftError as error:
            # Nobody else can take it before the lease is over, and then `term` says so.
            _log.warning("leadership_not_renewed", error=error.message)
            return self.term is not None
        if not answer.leads:
            if self._term is not None:
                self._lose(self._term)
            return False
        if asked <= self._lost_at:
            # Meanwhile the store said that the term is over: that word is newer than this one.
            return await self.run_once()
        self._until = asked + min(answer.left_seconds, TTL_SECONDS)
        if self._term != answer.term:
            _log.info("leadership_won", term=answer.term)
            self._set(answer.term)
        return self.term is not None

    async def resign(self) -> None:
        """Give leadership up, so that a standby need not wait; a failure costs only that."""
        term = self._term
        if term is None:
            return
        self._set(None)
        try:
            await self._client.resign(self._holder, term)
        except NightshiftError as error:
            _log.warning("resign_failed", error=error.message)

    def _lose(self, term: int) -> None:
        _log.warning("leadership_lost", term=term)
        self._set(None)

    def _set(self, term: int | None) -> None:
        self._term = term
        _LEADS.set(0 if term is None else 1)
        self._on_change()
