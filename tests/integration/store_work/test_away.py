"""A store that was away hands out nothing that still runs, and loses nothing that does not."""

from protos.nightshift.v1 import batches_pb2, dispatch_pb2
from tests.integration.store_work.harness import Store

HOUR = 3_600
LEASE = 15


async def begun(store: Store) -> tuple[str, dispatch_pb2.Dispatch, str]:
    """Let a batch of four lines run at e0, all in its engine, while the store looks regularly."""
    store.context.db.look()
    await live(store, 20)
    batch = await store.batch(4)
    [dispatch] = await store.cut((batch, 4))
    attempt = await store.open(dispatch)
    await store.beat({attempt.token: [(0, 4)]})
    return batch, dispatch, attempt.token


async def live(store: Store, seconds: int, *, beating: str = "") -> None:
    """Let time pass for a store that is there, and for executors that beat."""
    for _ in range(seconds):
        store.clock.advance(1)
        store.context.db.look()
        if beating:
            assert await store.beat({beating: [(0, 4)]}) == {}


def away(store: Store, seconds: int) -> None:
    """Let time pass in which neither the store nor its database answers anybody."""
    store.clock.advance(seconds)
    store.context.db.look()


async def test_what_runs_on_is_handed_out_no_second_time(store: Store) -> None:
    batch, _, token = await begun(store)
    away(store, 40)
    assert await store.reclaim() == []
    await live(store, 2 * LEASE, beating=token)
    assert await store.reclaim() == []
    assert await store.finish(token, range(4), batch) == 4


async def test_who_does_not_come_back_loses_his_lines_a_lease_later(store: Store) -> None:
    _, dispatch, _ = await begun(store)
    away(store, 40)
    await live(store, LEASE - 1)
    assert await store.reclaim() == []
    await live(store, 1)
    again = await store.reclaim()
    assert [each.line_count for each in again] == [4]
    assert again[0].chunk_id != dispatch.chunk_id or again[0].dispatch == dispatch.dispatch + 1


async def test_a_message_that_came_again_meanwhile_waits_while_its_attempt_beats(
    store: Store,
) -> None:
    batch, dispatch, token = await begun(store)
    away(store, 40)
    for _ in range(4):
        answer = await store.deliver(dispatch, "e1", delivered=2)
        assert 0 < answer.busy.retry_after_ms <= 5_000
        await live(store, 5, beating=token)
    assert await store.finish(token, range(4), batch) == 4
    assert (await store.deliver(dispatch, "e1", delivered=3)).gone.reason == "ended"


async def test_a_message_that_came_again_takes_over_from_who_stays_silent(store: Store) -> None:
    _, dispatch, _ = await begun(store)
    away(store, 40)
    assert (await store.deliver(dispatch, "e1", delivered=2)).HasField("busy")
    await live(store, 5)
    # Its lines were in an engine, so that they are suspects.
    assert (await store.deliver(dispatch, "e1", delivered=2)).gone.reason == "superseded"
    assert [each.alone for each in await store.reclaim()] == [True]


async def test_what_is_handed_back_is_handed_out_at_once(store: Store) -> None:
    _, _, token = await begun(store)
    away(store, 40)
    await store.hand_back(token)
    assert [each.line_count for each in await store.reclaim()] == [4]


async def test_a_clock_that_is_set_ahead_takes_nothing_from_who_runs(store: Store) -> None:
    _, _, token = await begun(store)
    store.clock.set_by(HOUR)
    store.context.db.look()
    assert await store.reclaim() == []
    await live(store, 2 * LEASE, beating=token)
    assert await store.reclaim() == []


async def test_after_a_clock_was_set_back_the_lost_are_found_all_the_same(store: Store) -> None:
    await begun(store)
    store.clock.set_by(-HOUR)
    store.context.db.look()
    # The leader of an hour ahead is gone; another one need not wait for that hour.
    assert (await store.lead("scheduler-1")).leader
    await live(store, LEASE)
    assert [each.line_count for each in await store.reclaim()] == [4]


async def test_a_chunk_from_before_the_clock_was_set_back_is_found_where_its_message_was_lost(
    store: Store,
) -> None:
    (dispatch,) = await store.cut((await store.batch(4), 4))
    store.clock.set_by(-HOUR)
    store.context.db.look()
    await store.lead("scheduler-1")
    (raised,) = await store.reclaim()
    assert (raised.chunk_id, raised.dispatch) == (dispatch.chunk_id, 2)


async def test_deadlines_follow_the_time(store: Store) -> None:
    batch, _, _ = await begun(store)
    store.clock.set_by(25 * HOUR)
    store.context.db.look()
    await store.turn()
    await live(store, 2)
    await store.turn()
    assert (await store.get(batch)).status == batches_pb2.BATCH_STATUS_EXPIRED


async def test_a_cancel_from_before_the_clock_was_set_back_ends_too(store: Store) -> None:
    batch, _, _ = await begun(store)
    await store.cancel(batch)
    store.clock.set_by(-HOUR)
    store.context.db.look()
    await store.turn()
    assert (await store.get(batch)).status == batches_pb2.BATCH_STATUS_CANCELLED
