"""Whose lines enter the engine next: those of the earliest attempt, or of suspects alone."""

import heapq

from services.executor.attempts import Attempt, Attempts


class Lineup:
    """Attempts with lines that are ready for the engine, earliest first."""

    def __init__(self, attempts: Attempts) -> None:
        """Begin with none; `attempts` knows whether one must be alone."""
        self._attempts = attempts
        self._queue: list[Attempt] = []

    def add(self, attempt: Attempt) -> None:
        """Count it in if it has lines ready; repeatable."""
        if attempt.ready and not attempt.queued and not attempt.closed:
            attempt.queued = True
            heapq.heappush(self._queue, attempt)

    def first(self, in_engine: int) -> Attempt | None:
        """Return the attempt whose lines are next, if any may enter; it stays the first.

        Args:
            in_engine: lines in the engine now, of whatever attempt.
        """
        while self._queue and (self._queue[0].closed or not self._queue[0].ready):
            heapq.heappop(self._queue).queued = False
        alone = self._attempts.first_alone()
        if alone is None:
            return self._queue[0] if self._queue else None
        # Suspects run with nothing else in the engine: what is in it ends first.
        others = in_engine - len(alone.running)
        return alone if alone.ready and not alone.closed and not others else None
