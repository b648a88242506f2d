"""A slow engine is not taken for one that hangs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.engine_stall import LONGEST_STEPS, Stall

pytestmark = pytest.mark.unit


def judged(stall: Stall, *stalled: float, at_least: float = 60) -> list[bool]:
    return [bool(stall.judge(each, at_least_seconds=at_least)) for each in stalled]


def test_the_limit_follows_the_longest_step_that_ended() -> None:
    stall = Stall()
    assert judged(stall, 10, 50, 59, 0, 100, 150, 0, 440, 1) == [False] * 9
    assert judged(stall, 1_000, 1_319, 1_320) == [False, False, True]
    # An engine started anew is not slower than it was.
    assert judged(stall, 0, 1_319, 1_320) == [False, False, True]


def test_the_reason_names_the_setting() -> None:
    reason = Stall().judge(61.2, at_least_seconds=60)
    assert "no step for 61 s" in reason
    assert "set NIGHTSHIFT_EXECUTOR_STALL_SECONDS above 60" in reason


@given(st.lists(st.floats(0, 1e6), max_size=30), st.floats(0.1, 1e4))
def test_whoever_takes_no_longer_than_its_longest_step_lives(
    steps: list[float], at_least: float
) -> None:
    stall, longest = Stall(), 0.0
    for step in steps:
        # Seen growing until it ends, as far as the limit lets it.
        grown = min(step, 0.99 * max(at_least, LONGEST_STEPS * longest))
        assert judged(stall, grown / 2, grown, 0, at_least=at_least) == [False] * 3
        longest = max(longest, grown)
    assert judged(stall, max(at_least, LONGEST_STEPS * longest), at_least=at_least) == [True]
