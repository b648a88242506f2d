"""Reconciling finds what nobody works on, and nothing else."""

import pytest

from tests.integration.store_work.harness import Store
from tests.integration.store_work.worker import ranges_of
from tests.kit.store import POOL

pytestmark = pytest.mark.integration


async def test_an_unopened_chunk_waits_for_the_queue_to_be_empty_and_two_seconds(
    store: Store,
) -> None:
    (dispatch,) = await store.cut((await store.batch(3), 3))
    assert await store.reclaim() == []
    store.clock.advance(2)
    assert await store.reclaim({POOL: 1}) == []
    assert await store.reclaim({}) == []
    assert await store.reclaim({"other": 0}) == []
    (raised,) = await store.reclaim({POOL: 0})
    assert (raised.chunk_id, raised.dispatch) == (dispatch.chunk_id, 2)
    # The new dispatch has its own two seconds.
    assert await store.reclaim() == []
    assert (await store.open(raised)).attempt == 1


async def test_a_live_lease_is_left_alone_and_a_lapsed_one_is_not(store: Store) -> None:
    batch_id = await store.batch(4)
    first, second = await store.cut((batch_id, 2), (batch_id, 2))
    token = (await store.open(first)).token
    await store.open(second)
    store.clock.advance(14)
    await store.beat({token: []})
    assert await store.reclaim() == []
    store.clock.advance(1)
    raised = await store.reclaim({POOL: 9})
    assert [(each.chunk_id, each.dispatch, each.alone) for each in raised] == [
        (second.chunk_id, 2, False)
    ]
    assert await store.reclaim() == []
    # A beat is good for a whole lease, and for no more.
    store.clock.advance(13)
    assert await store.reclaim({POOL: 9}) == []
    store.clock.advance(1)
    raised = await store.reclaim({POOL: 9})
    assert [(each.chunk_id, each.dispatch) for each in raised] == [(first.chunk_id, 2)]


async def test_chunks_come_back_in_the_order_of_batches_and_lines(store: Store) -> None:
    one, two = await store.batch(6), await store.batch(4)
    cut = await store.cut((two, 2), (one, 2), (two, 2), (one, 2), (one, 2))
    for dispatch in cut[::-1]:
        await store.open(dispatch)
    store.clock.advance(15)
    raised = await store.reclaim()
    assert [(each.batch_id, ranges_of(each.lines)) for each in raised] == [
        (one, [(0, 2)]),
        (one, [(2, 2)]),
        (one, [(4, 2)]),
        (two, [(0, 2)]),
        (two, [(2, 2)]),
    ]


async def test_stopping_ended_and_late_batches_are_not_handed_out_again(store: Store) -> None:
    cancelled, late, done = (
        await store.batch(2),
        await store.batch(2, window_seconds=15),
        await store.batch(1),
    )
    cut = await store.cut((cancelled, 2), (late, 2), (done, 1))
    tokens = [(await store.open(each)).token for each in cut]
    await store.finish(tokens[2], [0], done)
    await store.cancel(cancelled)
    store.clock.advance(15)
    assert await store.reclaim() == []


async def test_what_lost_leases_had_in_engines_goes_apart_and_the_rest_goes_on(
    store: Store,
) -> None:
    batch_id = await store.batch(10)
    first, second = await store.cut((batch_id, 5), (batch_id, 5))
    one, two = await store.open(first), await store.open(second)
    await store.beat({one.token: [(1, 2)], two.token: [(8, 2)]})
    await store.finish(one.token, [2], batch_id)
    store.clock.advance(15)
    raised = await store.reclaim()
    assert [(each.alone, ranges_of(each.lines)) for each in raised] == [
        (True, [(1, 1), (8, 2)]),
        (False, [(0, 1), (3, 2)]),
        (False, [(5, 3)]),
    ]
    alone = await store.open(raised[0], "e1")
    # Attempts of a line go on counting, wherever it runs.
    assert (alone.attempt, alone.deaths) == (2, 1)
    assert await store.finish(alone.token, [1, 8, 9], batch_id) == 3
