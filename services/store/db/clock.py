"""The time that decides: the database's, kept by a clock that never jumps.

Leases and deadlines of all stores are compared with each other, so they must be of one clock. It is
the database server's (SQLite: this machine's). Every write transaction brings it along, and so does
a look each second; between two of them a monotonic clock carries it on.

A store that was away (it starts, the database was gone, its process was stopped, the clock was set)
has heard no beats, so a lease that has run out says nothing then. `heard_since_ms` is from when on
beats could be heard without a gap. A lease lapses only if it has run out *and* its whole length has
passed since then, so that what still runs beats first and is handed out no second time. Whoever
gives a lease up himself sets it to `GIVEN_UP`, which needs no waiting.
"""

import threading
from typing import Final

from services.kit.process.clock import Clock
from services.kit.process.log import get_logger

_log = get_logger(__name__)

GIVEN_UP: Final = 0
"""End of a lease that its holder gave up, or that is known to be lost."""

FAR_MS: Final = 60_000
"""No lease ends so much later than its length from now on: the clock was set back meanwhile."""

JUMP_SECONDS: Final = 2.0
"""A clock that is so far from where it was carried to has been set."""
GAP_SECONDS: Final = 4.0
"""Without a sign of the database for so long, beats may have been missed."""
_SLOWEST_SECONDS: Final = 1.0
"""An answer that took longer (a lock was waited for, the process was stopped) tells no time."""


class DatabaseTime:
    """The database's time; safe to use from several threads."""

    def __init__(self, clock: Clock) -> None:
        """Begin with `clock`'s own time, nothing heard yet."""
        self._lock = threading.Lock()
        self._faulty_at: float | None = None
        self._why: str | None = None
        self._regular = False
        self._begin(clock)

    def _begin(self, clock: Clock) -> None:
        self._clock = clock
        self._seen_at = clock.monotonic()
        self._offset = clock.now() - self._seen_at
        self._since = clock.now()
        self._observed = False

    def carry_by(self, clock: Clock) -> None:
        """Let another clock carry the time, beginning again where it is another one."""
        if clock is not self._clock:
            with self._lock:
                self._begin(clock)

    def look_regularly(self) -> None:
        """Take a long time without `observe` for one in which the database was away."""
        self._regular = True

    def carried(self) -> float:
        """Return seconds of the clock that carries the time; only differences mean anything."""
        return self._clock.monotonic()

    def system(self) -> float:
        """Return seconds since the epoch by this machine."""
        return self._clock.now()

    def now_ms(self) -> int:
        """Return the database's time in milliseconds since the epoch."""
        return int((self._clock.monotonic() + self._offset) * 1000)

    @property
    def heard_since_ms(self) -> int:
        """From when on, by the database's time, beats could be heard without a gap."""
        return int(self._since * 1000)

    def observe(self, seconds: float, *, asked: float) -> None:
        """Take note of the database's time.

        Args:
            seconds: since the epoch, as the database said.
            asked: `carried()` when it was asked.
        """
        with self._lock:
            now = self.carried()
            if now - asked > _SLOWEST_SECONDS and self._observed:
                return
            offset = seconds - now
            why = self._doubt(now, offset)
            self._seen_at, self._offset, self._observed = now, offset, True
            if why is not None:
                self._since = seconds
                if why != self._why:
                    (_log.info if why == "start" else _log.warning)("leases_wait", why=why)
            self._why = why

    def _doubt(self, now: float, offset: float) -> str | None:
        """Say why beats may have been missed until now, if they may."""
        if not self._observed:
            return "start"
        if abs(offset - self._offset) > JUMP_SECONDS:
            return "clock_set"
        if self._regular and now - self._seen_at > GAP_SECONDS:
            return "database_silent"
        if self._faulty_at is not None and now - self._faulty_at > JUMP_SECONDS:
            return "database_not_written"
        return None

    def faulty(self, since: float) -> None:
        """Take note that nothing could be written, tried from `since` (`carried()`) on."""
        with self._lock:
            if self._faulty_at is None:
                self._faulty_at = since

    def written(self) -> None:
        """Take note that a transaction was committed."""
        self._faulty_at = None
