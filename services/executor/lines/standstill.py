"""Whether this process stood still: stopped, or stuck in its loop."""

from typing import Final

STOOD_STILL_SECONDS: Final = 2.0
"""Whoever runs looks each second; where it took longer, this process stood still."""


class Standstill:
    """Known from the time between two looks."""

    def __init__(self, now: float) -> None:
        """Look for the first time; `now` in seconds of a clock that runs on meanwhile."""
        self._looked_at = now
        self.last_at = float("-inf")
        """A moment at which it stood still last. What was heard before may be true no more."""

    def look(self, now: float) -> float:
        """Return the seconds since the last look, if it stood still meanwhile; else 0."""
        before, self._looked_at = self._looked_at, now
        if now - before <= STOOD_STILL_SECONDS:
            return 0.0
        self.last_at = before + STOOD_STILL_SECONDS
        return now - before
