"""Time as an argument, so that tests can set it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where a component gets its time from."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Return seconds of a clock that never jumps."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds since some fixed moment."""
        return time.monotonic()


class ManualClock:
    """A fake clock that moves only when told to."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        """Start at `start` seconds since the epoch."""
        self._now = start
        self._set_by = 0.0

    def now(self) -> float:
        """Return the time that was set."""
        return self._now + self._set_by

    def monotonic(self) -> float:
        """Return the same, as seconds that never jump."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move `seconds` (not negative) ahead."""
        if seconds < 0:
            raise ValueError("a manual clock moves forward only")
        self._now += seconds

    def set_by(self, seconds: float) -> None:
        """Set the time `seconds` ahead or back, as an operator does; `monotonic` does not jump."""
        self._set_by += seconds
