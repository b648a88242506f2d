"""What a batch waits for, as its object says it."""

import pytest

from protos.nightshift.v1 import (
    admin_pb2,
    batches_pb2,
    common_pb2,
    events_pb2,
    models_pb2,
    work_pb2,
)
from services.kit.calls import rpc
from services.kit.wire import ids
from services.kit.wire.errors import StaleTermError
from services.store.domain.explanation import MOST_AHEAD
from tests.integration.store_work.harness import Store
from tests.kit.store import POOL, chat_line, our_errors

pytestmark = pytest.mark.integration

OTHER = ids.pool_id_of("other")
FIELDS = ("pool", "queue_position", "executors", "reason", "engine_revision")


async def report(store: Store, *, term: int | None = None, **ready: int) -> None:
    """Say of pools how many executors they have; `-1` of one that is alive and not ready."""
    await store.lead()
    names = {"simulated": POOL, "other": OTHER, "unknown": "unknown-12345678"}
    pools = [
        work_pb2.PoolReport(
            pool_id=names[name], executors_alive=abs(number), executors_ready=max(0, number)
        )
        for name, number in ready.items()
    ]
    with our_errors():
        await store.work.ReportPools(
            work_pb2.ReportPoolsRequest(term=store.term if term is None else term, pools=pools),
            metadata=store.metadata,
        )


def shown(batch: batches_pb2.Batch) -> tuple[object, ...]:
    """Position, executors and reason; None for what is absent."""
    said = batch.nightshift
    return tuple(
        getattr(said, name) if said.HasField(name) else None
        for name in ("queue_position", "executors", "reason")
    )


async def test_a_batch_says_what_it_waits_for(store: Store) -> None:
    first, second = await store.batch(3), await store.batch(3)
    assert shown(await store.get(second)) == (1, None, "1 batch ahead")
    batch = await store.get(first)
    assert shown(batch) == (0, None, None)
    assert batch.nightshift.pool == POOL
    await report(store, simulated=0)
    assert shown(await store.get(first)) == (0, 0, f"no executor of pool {POOL} is alive")
    await report(store, simulated=-2)
    assert shown(await store.get(first)) == (0, 0, f"no engine of pool {POOL} is ready")
    await report(store, simulated=2, unknown=7)
    assert shown(await store.get(first)) == (0, 2, None)
    assert shown(await store.get(second)) == (1, 2, "1 batch ahead")

    # A batch with nothing left to hand out is in nobody's way.
    (dispatch,) = await store.cut((first, 3))
    assert shown(await store.get(second)) == (0, 2, None)
    assert shown(await store.get(first)) == (0, 2, None)

    # What was said long ago is known no more.
    store.clock.advance(31)
    assert shown(await store.get(second)) == (0, None, None)

    token = (await store.open(dispatch)).token
    await store.finish(token, range(3), first)
    await store.turn()
    done = await store.get(first)
    assert shown(done) == (None, None, None)
    assert done.nightshift.pool == POOL


async def test_one_that_is_being_validated_waits_for_nothing_yet(store: Store) -> None:
    file = await store.upload(chat_line("r0"))
    batch = await store.create(file.id)
    assert [name for name in FIELDS if batch.nightshift.HasField(name)] == []
    assert batch.HasField("nightshift")


async def test_the_engines_revision_is_that_of_its_executors(store: Store) -> None:
    batch_id = await store.batch(1)
    await store.work.RegisterExecutor(
        work_pb2.RegisterExecutorRequest(
            executor_id="e9", incarnation="i", pool_id=POOL, engine_revision="abc"
        ),
        metadata=store.metadata,
    )
    assert (await store.get(batch_id)).nightshift.engine_revision == "abc"
    cancelled = await store.cancel(batch_id)
    assert cancelled.nightshift.engine_revision == "abc"
    assert shown(cancelled) == (None, None, None)


async def test_the_engines_that_ran_a_batch_are_kept_with_it(store: Store) -> None:
    """Two executors of different versions, of which one is restarted with other arguments."""

    async def register(executor: str, incarnation: str, revision: str) -> None:
        await store.work.RegisterExecutor(
            work_pb2.RegisterExecutorRequest(
                executor_id=executor,
                incarnation=incarnation,
                pool_id=POOL,
                models=["simulated"],
                engine_revision=revision,
            ),
            metadata=store.metadata,
        )

    async def engines(batch_id: str) -> list[tuple[str, list[str]]]:
        said = (await store.get(batch_id)).nightshift
        return [(each.pool, list(each.revisions)) for each in said.engines]

    await register("old", "i1", "aaaa")
    await register("new", "i1", "bbbb")
    batch_id, other = await store.batch(8), await store.batch(1)
    cut = await store.cut(*[(batch_id, 2)] * 4)
    assert await engines(batch_id) == []
    for dispatch, executor in zip(cut, ("new", "new", "old", "old"), strict=True):
        if dispatch is cut[3]:
            await register("old", "i2", "cccc")
        store.clock.advance(1)
        life = "i2" if dispatch is cut[3] else "i1"
        attempt = await store.open(dispatch, executor, incarnation=life)
        lines = range(dispatch.lines[0].first, dispatch.lines[0].first + 2)
        await store.finish(attempt.token, lines, batch_id)
    expected = [(POOL, ["bbbb", "aaaa", "cccc"])]
    assert await engines(batch_id) == expected
    assert await engines(other) == []
    await store.turn()
    store.clock.advance(7_200)
    await store.turn()
    await store.sweeper.run_once()
    assert (await store.get(batch_id)).status == batches_pb2.BATCH_STATUS_COMPLETED
    assert await engines(batch_id) == expected
    answer = await store.batches.ListBatches(
        batches_pb2.ListBatchesRequest(), metadata=store.metadata
    )
    listed = {each.id: len(each.nightshift.engines) for each in answer.batches}
    assert listed == {batch_id: 1, other: 0}


async def test_why_an_engine_does_not_start_is_told(store: Store) -> None:
    batch_id = await store.batch(1)
    made = await store.batches.CreateBatch(
        batches_pb2.CreateBatchRequest(
            input_file_id=(await store.get(batch_id)).input_file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            completion_window_seconds=86_400,
        ),
        metadata=(*store.metadata, (rpc.API_KEY_ID_KEY, "key_1")),
    )
    await store.validated(made.batch.id)
    await store.lead()
    for trouble, ready in (("no such file: /m\nTraceback", 0), ("x" * 900, 0), ("", 1)):
        report = work_pb2.PoolReport(
            pool_id=POOL, executors_alive=1, executors_ready=ready, trouble=trouble
        )
        await store.work.ReportPools(
            work_pb2.ReportPoolsRequest(term=store.term, pools=[report]), metadata=store.metadata
        )
        reason = (await store.get(batch_id)).nightshift.reason
        said = trouble.replace("\n", " ")[:500]
        expected = f"no engine of pool {POOL} is ready: {said}" if trouble else ""
        assert reason == expected
        # They name paths and hosts: of a batch with a key it is only said that it is so.
        (answer,) = (
            await store.events.ReadBatchEvents(
                events_pb2.ReadBatchEventsRequest(
                    watch=events_pb2.WatchBatchRequest(batch_id=made.batch.id)
                ),
                metadata=store.metadata,
            )
        ).events
        for batch in (await store.get(made.batch.id), answer.state.batch):
            assert not trouble or said not in batch.nightshift.reason
            assert bool(trouble) == ("executor says why" in batch.nightshift.reason)


async def test_positions_on_a_page_are_those_of_the_pool(store: Store) -> None:
    """Also with another pool's and another project's batches between them."""
    await store.admin.PutModels(
        admin_pb2.PutModelsRequest(models=[models_pb2.Model(id="other", pool_id=OTHER)]),
        metadata=store.metadata,
    )
    mine = []
    for number in range(4):
        mine.append(await store.batch(2))
        if number == 1:
            elsewhere = await store.batch([chat_line("r0", model="other")])
            store.project_id = "default"
            await store.cut((mine[0], 1))
    await store.cut((mine[2], 2))
    await report(store, simulated=1, other=0)
    answer = await store.batches.ListBatches(
        batches_pb2.ListBatchesRequest(page=common_pb2.PageRequest(limit=10)),
        metadata=store.metadata,
    )
    said = {batch.id: shown(batch) for batch in answer.batches}
    assert said == {
        mine[0]: (0, 1, None),
        mine[1]: (1, 1, "1 batch ahead"),
        # All handed out: it waits for nobody, and nobody for it.
        mine[2]: (0, 1, None),
        mine[3]: (2, 1, "2 batches ahead"),
        elsewhere: (0, 0, f"no executor of pool {OTHER} is alive"),
    }
    for batch_id, expected in said.items():
        assert shown(await store.get(batch_id)) == expected


async def test_positions_are_counted_up_to_a_bound(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_AHEAD == 1_000
    monkeypatch.setattr("services.store.batches.pools_repo.MOST_AHEAD", 3)
    batches = [await store.batch(1) for _ in range(6)]
    answer = await store.batches.ListBatches(
        batches_pb2.ListBatchesRequest(), metadata=store.metadata
    )
    listed = {batch.id: batch.nightshift.queue_position for batch in answer.batches}
    assert [listed[each] for each in batches] == [0, 1, 2, 3, 3, 3]
    alone = [(await store.get(each)).nightshift.queue_position for each in batches]
    assert alone == [0, 1, 2, 3, 3, 3]


async def test_a_stream_tells_it_too(store: Store) -> None:
    await store.batch(1)
    batch_id = await store.batch(1)
    page = await store.events.ReadBatchEvents(
        events_pb2.ReadBatchEventsRequest(watch=events_pb2.WatchBatchRequest(batch_id=batch_id)),
        metadata=store.metadata,
    )
    assert shown(page.events[0].state.batch) == (1, None, "1 batch ahead")


async def test_only_the_leader_is_believed(store: Store) -> None:
    with pytest.raises(StaleTermError):
        await report(store, term=99, simulated=5)
