"""The sliding window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.wire.ids import BatchId, PoolId
from services.scheduler.domain.window import Window, WindowBatch

pytestmark = pytest.mark.unit

POOLS = [PoolId("a-1"), PoolId("b-2"), PoolId("c-3")]


def batch(seq: int, pool: PoolId = POOLS[0], **changes: int) -> WindowBatch:
    values = {
        "lines_total": 10,
        "lines_cut": 0,
        "expires_at_ms": 1_000,
        "line_bytes_mean": 100,
    } | changes
    return WindowBatch(batch_id=BatchId(f"batch_{seq}"), seq=seq, pool_id=pool, **values)


batches = st.lists(
    st.builds(batch, st.integers(1, 10_000), st.sampled_from(POOLS), lines_cut=st.integers(0, 10)),
    unique_by=lambda each: each.seq,
)


@given(batches, st.integers(1, 20))
def test_holds_the_first_batches_of_each_pool_in_order(
    arrived: list[WindowBatch], most: int
) -> None:
    window = Window.of(arrived, most)
    for pool in POOLS:
        of_pool = sorted(each.seq for each in arrived if each.pool_id == pool)
        assert [each.seq for each in window.pools.get(pool, ())] == of_pool[:most]
        assert (pool in window.full) == (len(of_pool) >= most)


@given(batches)
def test_the_order_of_the_answer_does_not_matter(arrived: list[WindowBatch]) -> None:
    assert Window.of(arrived) == Window.of(reversed(arrived))


def test_what_has_expired_is_not_open() -> None:
    window = Window.of([batch(1, expires_at_ms=500), batch(2)])
    assert [each.seq for each in window.open_batches(POOLS[0], 499)] == [1, 2]
    assert [each.seq for each in window.open_batches(POOLS[0], 500)] == [2]


def test_cutting_advances_a_batch_until_it_leaves() -> None:
    window = Window.of([batch(1), batch(2)])
    window = window.advanced({(POOLS[0], BatchId("batch_1")): 4})
    assert [each.lines_left for each in window.pools[POOLS[0]]] == [6, 10]
    window = window.advanced({(POOLS[0], BatchId("batch_1")): 6})
    assert BatchId("batch_1") not in window
    assert BatchId("batch_2") in window
    assert len(window) == 1


def test_lacks_only_where_the_store_has_more() -> None:
    window = Window.of([batch(1), batch(2), batch(3, POOLS[1])], most=2)
    gone = window.without(each.batch_id for each in (batch(1), batch(2), batch(3)))
    assert not window.lacks(POOLS[0])
    assert gone.lacks(POOLS[0])
    assert not gone.lacks(POOLS[1])


def test_a_batch_of_several_pools_is_in_the_window_of_each() -> None:
    window = Window.of([batch(1), batch(1, POOLS[1]), batch(2)])
    window = window.advanced({(POOLS[1], BatchId("batch_1")): 4})
    assert [each.lines_left for each in window.pools[POOLS[0]]] == [10, 10]
    assert [each.lines_left for each in window.pools[POOLS[1]]] == [6]
    barren = window.without_keys([(POOLS[0], BatchId("batch_1"))])
    assert [each.seq for each in barren.pools[POOLS[0]]] == [2]
    assert BatchId("batch_1") in barren
    assert BatchId("batch_1") not in window.without([BatchId("batch_1")])
