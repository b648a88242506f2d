"""The token bucket of a key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import limits
from services.gateway.limits import RequestLimiter, duration
from services.kit.process.clock import ManualClock
from services.kit.wire.errors import RateLimitedError


def test_a_minutes_requests_may_come_at_once() -> None:
    limiter = RequestLimiter(ManualClock())
    left = [limiter.take("k", 3) for _ in range(3)]
    assert [one.remaining for one in left] == [2, 1, 0]
    assert [one.wait_seconds for one in left] == [0, 0, 0]
    assert left[0].headers() == (
        ("x-ratelimit-limit-requests", "3"),
        ("x-ratelimit-remaining-requests", "2"),
        ("x-ratelimit-reset-requests", "20s"),
    )
    left[-1].check()
    refused = limiter.take("k", 3)
    assert (refused.remaining, refused.reset_seconds, refused.wait_seconds) == (0, 60, 20)
    with pytest.raises(RateLimitedError, match=r"Limit: 3 / min\. Please try again in 20s\.") as e:
        refused.check()
    assert (e.value.type, e.value.code, e.value.param) == ("requests", "rate_limit_exceeded", None)
    assert e.value.retry_after_seconds == 20


def test_a_refused_request_costs_nothing_and_waiting_as_told_is_enough() -> None:
    clock = ManualClock()
    limiter = RequestLimiter(clock)
    limiter.take("k", 7)
    for _ in range(200):
        allowance = limiter.take("k", 7)
        clock.advance(allowance.wait_seconds)
        if allowance.wait_seconds:
            assert limiter.take("k", 7).wait_seconds == 0


def test_keys_do_not_share() -> None:
    limiter = RequestLimiter(ManualClock())
    assert limiter.take("a", 1).wait_seconds == 0
    assert limiter.take("b", 1).wait_seconds == 0
    assert limiter.take("a", 1).wait_seconds == 60


@given(st.integers(1, 50), st.lists(st.floats(0, 30), max_size=100))
def test_never_more_than_the_limit_and_its_refill(limit: int, pauses: list[float]) -> None:
    clock = ManualClock(0.0)
    limiter = RequestLimiter(clock)
    granted = 0
    for pause in [0.0, *pauses]:
        clock.advance(pause)
        granted += limiter.take("k", limit).wait_seconds == 0
        assert granted <= limit + clock.monotonic() * limit / 60 + 1e-3


def test_buckets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BUCKETS", 2)
    limiter = RequestLimiter(ManualClock())
    for key in ("a", "b", "a", "c"):
        limiter.take(key, 2)
    assert limiter.take("a", 2).wait_seconds > 0
    # The one that was quiet longest was forgotten.
    assert limiter.take("b", 2).remaining == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.12, "120ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (90, "1m30s"),
        (360, "6m0s"),
    ],
)
def test_durations_are_spelt_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
