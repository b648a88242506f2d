"""What pools can take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.wire.ids import PoolId
from services.scheduler.domain.capacity import ExecutorWord, capacity_of

pytestmark = pytest.mark.unit

words = st.builds(
    ExecutorWord,
    executor_id=st.just("executor-0"),
    pool_id=st.just(PoolId("a-1")),
    at_ms=st.just(0),
    seats=st.integers(1, 512),
    held_lines=st.integers(0, 10_000),
    low_water=st.integers(1, 6_000),
    high_water=st.integers(2, 8_192),
    lines_per_second=st.floats(0, 1e6),
    ready=st.booleans(),
)


@given(words)
def test_an_executor_asks_below_low_water_only(word: ExecutorWord) -> None:
    if not word.ready or word.held_lines >= word.low_water:
        assert word.asked_lines == 0
    else:
        assert word.asked_lines == max(0, word.high_water - word.held_lines)


@given(st.lists(words, max_size=5))
def test_a_pool_is_the_sum_of_its_room_at_the_speed_of_its_slowest(
    executors: list[ExecutorWord],
) -> None:
    capacity = capacity_of(executors)
    ready = [word for word in executors if word.ready]
    assert capacity.executors == len(ready)
    assert capacity.room == sum(word.asked_lines for word in ready)
    for word in ready:
        assert capacity.seats <= word.seats
        assert word.lines_per_second == 0 or capacity.lines_per_second <= word.lines_per_second
    if not any(word.lines_per_second for word in ready):
        assert capacity.lines_per_second == 0
