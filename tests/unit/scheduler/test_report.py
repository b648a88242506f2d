"""What the scheduler says of pools, and when it is news."""

from dataclasses import replace

import pytest

from services.kit.wire.ids import PoolId
from services.scheduler.domain.capacity import ExecutorWord
from services.scheduler.domain.report import PoolReport, differs, report_of

pytestmark = pytest.mark.unit

POOL = PoolId("p")
REPORT = PoolReport(pool_id=POOL, alive=2, ready=1, seats=64, lines_per_second=100.0)


def word(*, ready: bool, rate: float = 10.0, name: str = "e", trouble: str = "") -> ExecutorWord:
    return ExecutorWord(
        executor_id=name,
        pool_id=POOL,
        at_ms=1,
        seats=64,
        held_lines=0,
        low_water=10,
        high_water=20,
        lines_per_second=rate,
        ready=ready,
        trouble=trouble,
    )


def test_executors_are_taken_together() -> None:
    words = [word(ready=True), word(ready=True, rate=5.0), word(ready=False, rate=99.0)]
    assert report_of(POOL, words) == PoolReport(
        pool_id=POOL, alive=3, ready=2, seats=128, lines_per_second=15.0
    )


def test_one_that_is_in_trouble_speaks_for_all_and_always_the_same() -> None:
    words = [
        word(ready=False, name="c", trouble="no memory"),
        word(ready=False, name="b", trouble="no GPU"),
        word(ready=True, name="a"),
    ]
    assert report_of(POOL, words).trouble == report_of(POOL, words[::-1]).trouble == "no GPU"


def test_a_pool_without_executors_is_told_too() -> None:
    assert report_of(POOL, []) == PoolReport(
        pool_id=POOL, alive=0, ready=0, seats=0, lines_per_second=0
    )


@pytest.mark.parametrize(
    ("now", "news"),
    [
        (REPORT, False),
        (replace(REPORT, lines_per_second=109.0), False),
        (replace(REPORT, lines_per_second=120.0), True),
        (replace(REPORT, lines_per_second=0.0), True),
        (replace(REPORT, alive=1), True),
        (replace(REPORT, ready=2), True),
        (replace(REPORT, seats=65), True),
        (replace(REPORT, trouble="no GPU"), True),
    ],
)
def test_small_changes_of_speed_are_no_news(now: PoolReport, news: bool) -> None:
    assert differs({POOL: REPORT}, {POOL: now}) == news


def test_pools_that_come_and_go_are_news() -> None:
    assert differs({}, {POOL: REPORT})
    assert differs({POOL: REPORT}, {})
    still = replace(REPORT, lines_per_second=0.0)
    assert not differs({POOL: still}, {POOL: still})
