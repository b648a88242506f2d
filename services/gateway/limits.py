"""How often a key may call: one token bucket a key, in this process.

Several gateways each give the whole allowance; the store is not asked for every request.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from services.kit.process.clock import Clock
from services.kit.wire.errors import RateLimitedError

MAX_BUCKETS: Final = 10_000
"""Keys that are remembered; the one that was quiet longest is forgotten: its bucket is full."""

_MINUTE: Final = 60.0
_HAIR: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a key has left after a request was counted, or would have been.

    Attributes:
        limit: requests a minute, and at once after a minute of quiet.
        remaining: requests that may follow at once.
        reset_seconds: until all of `limit` is there again.
        wait_seconds: until this request may be sent again; 0 where it was granted.
    """

    limit: int
    remaining: int
    reset_seconds: float
    wait_seconds: float

    def check(self) -> None:
        """Refuse the request that was not granted.

        Raises:
            RateLimitedError: it says how long to wait.
        """
        if self.wait_seconds > 0:
            raise RateLimitedError(
                f"Rate limit reached for requests. Limit: {self.limit} / min. Please try again in "
                f"{duration(self.wait_seconds)}.",
                code="rate_limit_exceeded",
                retry_after_seconds=self.wait_seconds,
            )

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return what the answer says about it, by OpenAI's names."""
        return (
            ("x-ratelimit-limit-requests", str(self.limit)),
            ("x-ratelimit-remaining-requests", str(self.remaining)),
            ("x-ratelimit-reset-requests", duration(self.reset_seconds)),
        )


class RequestLimiter:
    """The buckets of all keys."""

    def __init__(self, clock: Clock) -> None:
        """Fill buckets by `clock`."""
        self._clock = clock
        # Tokens, and when they were counted; the key that called last is last.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key_id: str, per_minute: int) -> Allowance:
        """Count one request of a key that may send `per_minute` (at least 1)."""
        now = self._clock.monotonic()
        rate = per_minute / _MINUTE
        tokens = self._tokens(key_id, per_minute, now)
        self._buckets.pop(key_id, None)
        # A hair less than one is one: waiting as long as was said must be enough.
        granted = tokens >= 1.0 - _HAIR
        wait = 0.0 if granted else (1.0 - tokens) / rate
        tokens = max(0.0, tokens - 1.0) if granted else tokens
        self._buckets[key_id] = tokens, now
        while len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return Allowance(
            limit=per_minute,
            remaining=int(tokens),
            reset_seconds=(per_minute - tokens) / rate,
            wait_seconds=wait,
        )

    def wait_seconds(self, key_id: str, per_minute: int) -> float:
        """Return how long until `take` would grant a request, and count none."""
        tokens = self._tokens(key_id, per_minute, self._clock.monotonic())
        return 0.0 if tokens >= 1.0 - _HAIR else (1.0 - tokens) / (per_minute / _MINUTE)

    def _tokens(self, key_id: str, per_minute: int, now: float) -> float:
        tokens, at = self._buckets.get(key_id, (float(per_minute), now))
        return min(float(per_minute), tokens + (now - at) * per_minute / _MINUTE)


def duration(seconds: float) -> str:
    """Return a time as OpenAI's headers spell it: `120ms`, `1.5s`, `6m0s`."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
