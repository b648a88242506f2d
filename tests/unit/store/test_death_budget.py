"""What engine deaths a project may cost a pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.domain.death_budget import (
    FREE_DEATHS,
    MOST_DEATHS,
    SHARE,
    Cost,
    charged,
    hold_ms,
    is_spent,
)

pytestmark = pytest.mark.unit

DAY_MS = 86_400_000


@given(
    taken_ms=st.integers(0, 600_000),
    executors=st.integers(0, 100),
    pauses=st.lists(st.integers(0, 3_600_000), max_size=80),
)
def test_deaths_take_no_more_than_their_share(
    taken_ms: int, executors: int, pauses: list[int]
) -> None:
    """However soon the next death comes once a batch may go on."""
    cost = Cost(taken_ms=taken_ms, executors=executors)
    deaths, now_ms, at_ms = 0.0, 0, 0
    for count, pause in enumerate(pauses, 1):
        deaths = charged(deaths, now_ms - at_ms, cost)
        at_ms = now_ms
        now_ms += hold_ms(deaths, cost, 100 * DAY_MS) + pause
        spent_ms = count * max(taken_ms, 1_000)
        free_ms = (FREE_DEATHS + 1) * max(taken_ms, 1_000)
        assert spent_ms <= free_ms + SHARE * max(1, executors) * (now_ms + 1) + count


def test_the_first_hold_nothing_up() -> None:
    cost = Cost(taken_ms=60_000, executors=2)
    deaths = 0.0
    for _ in range(int(FREE_DEATHS)):
        deaths = charged(deaths, 0, cost)
        assert hold_ms(deaths, cost, DAY_MS) == 0
    assert hold_ms(charged(deaths, 0, cost), cost, DAY_MS) == 60_000 / (SHARE * 2)


def test_a_hold_leaves_time_until_the_batch_expires() -> None:
    cost = Cost(taken_ms=60_000, executors=1)
    assert hold_ms(FREE_DEATHS + 5, cost, 40_000) == 10_000
    assert hold_ms(FREE_DEATHS + 5, cost, -1) == 0
    assert is_spent(3, FREE_DEATHS + 5, cost, 40_000)
    assert not is_spent(3, FREE_DEATHS + 5, cost, DAY_MS)
    assert is_spent(MOST_DEATHS, 1.0, cost, DAY_MS)


def test_clocks_that_are_set_back_charge_nothing_twice() -> None:
    assert charged(3.0, -5_000, Cost(taken_ms=1_000, executors=1)) == 4.0
