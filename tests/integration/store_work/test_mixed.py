"""Batches of several models, where that is allowed: each line runs on its own model's pool."""

import random
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import orjson
import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import admin_pb2, batches_pb2, dispatch_pb2, models_pb2, work_pb2
from services.kit.wire import ids
from services.store.tables.core import batch_models, outbox
from tests.integration.store_work.harness import Store, running
from tests.integration.store_work.worker import messages, ranges_of
from tests.kit.store import MODEL, POOL, chat_line, our_errors

pytestmark = pytest.mark.integration

OTHER = ids.pool_id_of("other")
COMPLETED = batches_pb2.BATCH_STATUS_COMPLETED
FAILED = batches_pb2.BATCH_STATUS_FAILED


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    """A store that takes several models: `simulated` and `alias` in a pool, `other` in another."""
    async with running(tmp_path / "data", mixed_models=True) as store:
        await put_models(store)
        yield store


async def put_models(store: Store) -> None:
    models = [
        models_pb2.Model(id="alias", pool_id=POOL),
        models_pb2.Model(id="other", pool_id=OTHER),
    ]
    await store.admin.PutModels(admin_pb2.PutModelsRequest(models=models), metadata=store.metadata)


def lines_of(models: Iterable[str]) -> list[bytes]:
    return [chat_line(f"r{number}", model=model) for number, model in enumerate(models)]


async def cut(store: Store, batch_id: str, pool: str, lines: int) -> list[dispatch_pb2.Dispatch]:
    await store.lead()
    wanted = [work_pb2.Cut(batch_id=batch_id, pool_id=pool, max_lines=lines, max_bytes=1 << 30)]
    with our_errors():
        answer = await store.work.CutChunks(
            work_pb2.CutChunksRequest(term=store.term, cuts=wanted), metadata=store.metadata
        )
    return list(answer.dispatches)


def ordinals(dispatch: dispatch_pb2.Dispatch) -> list[int]:
    return [
        line for first, count in ranges_of(dispatch.lines) for line in range(first, first + count)
    ]


async def window(store: Store) -> list[tuple[str, str, int, int, bool]]:
    await store.lead()
    return [
        (each.batch_id, each.pool_id, each.lines_cut, each.lines_total, each.several_models)
        for each in (await store.window()).batches
    ]


async def test_each_line_runs_on_its_own_models_pool(store: Store) -> None:
    models = [MODEL, "other", MODEL, "other", "other", MODEL]
    batch_id = await store.batch(lines_of(models))
    batch = await store.get(batch_id)
    assert batch.model == MODEL
    assert sorted(await window(store)) == sorted(
        [(batch_id, POOL, 0, 3, False), (batch_id, OTHER, 0, 3, False)]
    )
    told = await store.sql(sa.select(outbox.c.payload))
    events = [dispatch_pb2.Event.FromString(row.payload) for row in told]
    ready = {e.pool_id for e in events if e.kind == dispatch_pb2.EVENT_KIND_BATCH_READY}
    assert ready == {POOL, OTHER}

    (here,) = await cut(store, batch_id, POOL, 10)
    assert (here.pool_id, here.model, ordinals(here)) == (POOL, MODEL, [0, 2, 5])
    assert here.input_bytes == sum(len(lines_of(models)[line]) - 1 for line in (0, 2, 5))
    assert await cut(store, batch_id, POOL, 10) == []
    (there,) = await cut(store, batch_id, OTHER, 2)
    assert (there.pool_id, there.model, ordinals(there)) == (OTHER, "other", [1, 3])
    assert await window(store) == [(batch_id, OTHER, 2, 3, False)]
    (rest,) = await cut(store, batch_id, OTHER, 2)
    assert ordinals(rest) == [4]
    assert await window(store) == []

    for dispatch in (rest, here, there):
        attempt = await store.open(dispatch)
        assert attempt.lines == messages(ranges_of(dispatch.lines))
        read = await store.lines(attempt.token, ranges_of(dispatch.lines))
        assert {orjson.loads(line)["body"]["model"] for line in read.values()} == {dispatch.model}
        await store.finish(attempt.token, ordinals(dispatch), batch_id)
    await store.turn()
    assert (await store.get(batch_id)).status == COMPLETED
    output, _ = await store.end_files(batch_id)
    assert [line["custom_id"] for line in output] == [f"r{number}" for number in range(6)]
    assert await store.sql(sa.select(batch_models)) == []


async def test_a_chunk_is_of_one_model_and_a_pools_models_take_turns_by_line(store: Store) -> None:
    models = ["alias", MODEL, MODEL, "other", "alias", MODEL, "alias"]
    batch_id = await store.batch(lines_of(models))
    assert (await store.get(batch_id)).model == "alias"
    later = await store.batch(2)
    # In order of creation for each pool; `other` has no line before it.
    assert sorted(await window(store)) == sorted(
        [(batch_id, POOL, 0, 6, True), (batch_id, OTHER, 0, 1, False), (later, POOL, 0, 2, False)]
    )
    seen = []
    while dispatches := await cut(store, batch_id, POOL, 2):
        seen += [(each.model, ordinals(each)) for each in dispatches]
    assert seen == [("alias", [0, 4]), (MODEL, [1, 2]), (MODEL, [5]), ("alias", [6])]


async def test_every_line_is_cut_once_whatever_the_order(store: Store) -> None:
    chance = random.Random(11)
    models = [chance.choice([MODEL, "alias", "other"]) for _ in range(400)]
    batch_id = await store.batch(lines_of(models))
    cut_lines: list[int] = []
    left = {POOL, OTHER}
    while left:
        pool = chance.choice(sorted(left))
        dispatches = await cut(store, batch_id, pool, chance.randint(1, 60))
        if not dispatches:
            left.discard(pool)
        for dispatch in dispatches:
            assert {models[line] for line in ordinals(dispatch)} == {dispatch.model}
            assert dispatch.pool_id == pool
            cut_lines += ordinals(dispatch)
    assert sorted(cut_lines) == list(range(400))
    assert await window(store) == []


async def test_several_cuts_of_one_call_follow_one_another(store: Store) -> None:
    batch_id = await store.batch(lines_of([MODEL, "other"] * 4))
    await store.lead()
    wanted = [
        work_pb2.Cut(batch_id=batch_id, pool_id=pool, max_lines=lines, max_bytes=1 << 30)
        for pool, lines in ((POOL, 1), (OTHER, 3), (POOL, 2), ("nobody", 5), (POOL, 9), (POOL, 9))
    ]
    answer = await store.work.CutChunks(
        work_pb2.CutChunksRequest(term=store.term, cuts=wanted), metadata=store.metadata
    )
    assert [ordinals(each) for each in answer.dispatches] == [[0], [1, 3, 5], [2, 4], [6]]


async def test_suspects_stay_with_their_model(store: Store) -> None:
    batch_id = await store.batch(lines_of(["other", MODEL, "alias", "other", MODEL, "alias"]))
    (mine,) = await cut(store, batch_id, POOL, 5)
    (alias,) = await cut(store, batch_id, POOL, 5)
    (other,) = await cut(store, batch_id, OTHER, 5)
    tokens = [(await store.open(each)).token for each in (mine, alias)]
    there = (await store.open(other, "e1")).token
    # The engine dies with lines of two models in it.
    await store.died({tokens[0]: [(1, 1)], tokens[1]: [(2, 1), (5, 1)]})
    apart = [each for _ in range(3) for each in await alone(store)]
    # Those of one model are halved at once.
    assert {(each.pool_id, each.model, *ordinals(each)) for each in apart} == {
        (POOL, MODEL, 1),
        (POOL, "alias", 2),
        (POOL, "alias", 5),
    }
    await store.finish(there, [0, 3], batch_id)
    await store.died({there: [(0, 1)]}, executor="e1")
    assert await alone(store) == []


async def alone(store: Store) -> list[dispatch_pb2.Dispatch]:
    """Reclaim, and finish the suspects that come, so that the next may come."""
    found = [each for each in await store.reclaim({POOL: 0, OTHER: 0}) if each.alone]
    for each in found:
        token = (await store.open(each)).token
        await store.finish(token, ordinals(each), each.batch_id)
    return found


async def test_faults_name_the_lines_and_no_line_is_of_the_wrong_model(store: Store) -> None:
    lines = [
        *lines_of([MODEL, "other"]),
        chat_line("x2", model="nobody"),
        chat_line("x3", model=None),
        chat_line("x4", model="alias", stream=True),
    ]
    file = await store.upload(b"".join(lines))
    batch = await store.create(file.id)
    await store.validator.run_once()
    batch = await store.get(batch.id)
    assert batch.status == FAILED
    assert [(error.line, error.code) for error in batch.errors] == [
        (3, "model_not_found"),
        (4, "missing_required_parameter"),
        (5, "streaming_unsupported"),
    ]


async def test_without_the_setting_a_batch_has_one_model(tmp_path: Path) -> None:
    async with running(tmp_path / "data") as store:
        await put_models(store)
        file = await store.upload(b"".join(lines_of([MODEL, "other", MODEL, "alias"])))
        batch = await store.create(file.id)
        await store.validator.run_once()
        batch = await store.get(batch.id)
        assert [(error.line, error.code) for error in batch.errors] == [
            (2, "mismatched_model"),
            (4, "mismatched_model"),
        ]


async def test_a_file_of_one_model_is_as_ever(store: Store) -> None:
    batch_id = await store.batch(3)
    assert await store.sql(sa.select(batch_models)) == []
    (dispatch,) = await cut(store, batch_id, "whatever", 2)
    assert (dispatch.pool_id, dispatch.model, ordinals(dispatch)) == (POOL, MODEL, [0, 1])


async def test_it_says_which_pool_it_waits_for(store: Store) -> None:
    first = await store.batch(lines_of(["other"]))
    batch_id = await store.batch(lines_of([MODEL, "other"]))
    later = await store.batch(lines_of(["other"]))
    await report(store, simulated=1, other=0)
    said = (await store.get(batch_id)).nightshift
    assert (said.pool, said.executors, said.queue_position) == (OTHER, 0, 1)
    assert said.reason == f"no executor of pool {OTHER} is alive"
    await report(store, simulated=1, other=1)
    said = (await store.get(batch_id)).nightshift
    assert said.executors == 1
    # It stands before what came later in each of its pools.
    said = (await store.get(later)).nightshift
    assert (said.queue_position, said.reason) == (2, "2 batches ahead")
    await cut(store, batch_id, OTHER, 5)
    assert (await store.get(later)).nightshift.queue_position == 1
    said = (await store.get(batch_id)).nightshift
    assert (said.pool, said.queue_position, said.HasField("reason")) == (POOL, 0, False)
    await cut(store, batch_id, POOL, 5)
    assert (await store.get(batch_id)).nightshift.pool == POOL
    await cut(store, first, OTHER, 5)
    assert (await store.get(later)).nightshift.queue_position == 0


async def report(store: Store, *, simulated: int, other: int) -> None:
    await store.lead()
    pools = [
        work_pb2.PoolReport(pool_id=name, executors_alive=number, executors_ready=number)
        for name, number in ((POOL, simulated), (OTHER, other))
    ]
    await store.work.ReportPools(
        work_pb2.ReportPoolsRequest(term=store.term, pools=pools), metadata=store.metadata
    )
