"""Which answers end a line, and how long the others wait."""

import pytest

from services.executor.engines.base import EngineResponse
from services.executor.lines.retry import (
    BASE_SECONDS,
    COUNTED_RETRIES,
    LONGEST_SECONDS,
    SETTLED,
    Again,
    Backoff,
    judge,
)

pytestmark = pytest.mark.unit


def judged(status: int, *, counted: int = 0, retries: int = 0, chance: float = 0.5) -> object:
    return judge(EngineResponse(status, b"{}"), counted=counted, retries=retries, chance=chance)


@pytest.mark.parametrize("status", [200, 201, 400, 401, 403, 404, 413, 422, 499])
def test_answers_that_are_final(status: int) -> None:
    assert judged(status) is SETTLED


@pytest.mark.parametrize("status", [408, 409, 425, 500, 502, 504, 599])
def test_passing_faults_are_tried_three_more_times(status: int) -> None:
    for counted in range(COUNTED_RETRIES):
        verdict = judged(status, counted=counted)
        assert isinstance(verdict, Again)
        assert verdict.counted
    assert judged(status, counted=COUNTED_RETRIES) is SETTLED


@pytest.mark.parametrize("status", [429, 503])
def test_an_engine_that_asks_for_time_gets_it_uncounted(status: int) -> None:
    verdict = judged(status, counted=COUNTED_RETRIES, retries=1_000)
    assert isinstance(verdict, Again)
    assert not verdict.counted
    assert verdict.seconds <= LONGEST_SECONDS


def test_waits_grow_with_full_jitter() -> None:
    def seconds(retries: int, chance: float) -> float:
        verdict = judged(500, retries=retries, chance=chance)
        assert isinstance(verdict, Again)
        return verdict.seconds

    assert seconds(0, 0.0) == 0
    assert seconds(0, 0.5) == BASE_SECONDS / 2
    assert seconds(2, 0.5) == 4 * BASE_SECONDS / 2
    assert seconds(50, 0.999) <= LONGEST_SECONDS


def test_retry_after_is_obeyed() -> None:
    response = EngineResponse(429, b"{}", retry_after_seconds=7.0)
    verdict = judge(response, counted=0, retries=0, chance=0.5)
    assert isinstance(verdict, Again)
    assert 7.0 <= verdict.seconds <= 7.0 + BASE_SECONDS


def test_backoff_doubles_up_to_its_limit_and_begins_anew() -> None:
    backoff = Backoff(0.05, 1.0, lambda: 1.0)
    waits = [backoff.next_seconds() for _ in range(7)]
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    backoff.reset()
    assert backoff.next_seconds() == 0.05
    assert Backoff(1.0, 2.0, lambda: 0.0).next_seconds() == 0.5
