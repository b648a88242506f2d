"""The window holds what may run now, in order; chunks are cut from it without gap or overlap."""

from pathlib import Path

import pytest

from protos.nightshift.v1 import admin_pb2, batches_pb2, models_pb2
from services.kit.wire import ids
from tests.integration.store_work.harness import Store, running
from tests.integration.store_work.losing import input_of, input_taken, opened, put_back, soon, taken
from tests.integration.store_work.worker import ranges_of
from tests.kit.eventually import eventually
from tests.kit.store import POOL, chat_line

__all__ = ["soon"]

pytestmark = pytest.mark.integration


async def test_the_window_is_in_order_of_creation_and_says_what_is_left(store: Store) -> None:
    first, second = await store.batch(3), await store.batch(5)
    await store.cut((first, 2))
    window = await store.window()
    assert [(each.batch_id, each.lines_cut, each.lines_total) for each in window.batches] == [
        (first, 2, 3),
        (second, 0, 5),
    ]
    assert window.batches[0].seq < window.batches[1].seq
    assert window.batches[0].pool_id == POOL
    assert list(window.pool_ids) == [POOL]
    assert window.now_ms == int(store.clock.now() * 1000)
    assert window.batches[1].line_bytes_mean == pytest.approx(len(chat_line("r0")), abs=1)
    assert window.batches[1].expires_at_ms == window.now_ms + 86_400_000

    assert [each.batch_id for each in (await store.window(1)).batches] == [first]
    await store.cut((first, 2))
    assert [each.batch_id for each in (await store.window()).batches] == [second]


async def test_every_pool_has_its_own_share_of_the_window(store: Store) -> None:
    other = ids.pool_id_of("other")
    await store.admin.PutModels(
        admin_pb2.PutModelsRequest(models=[models_pb2.Model(id="other", pool_id=other)]),
        metadata=store.metadata,
    )
    mine = [await store.batch(1) for _ in range(3)]
    theirs = await store.batch([chat_line("r0", model="other")])
    await store.lead()
    window = await store.window(2)
    assert [each.batch_id for each in window.batches] == [*mine[:2], theirs]
    assert list(window.pool_ids) == sorted([POOL, other])


async def test_what_is_stopping_or_late_leaves_the_window(store: Store) -> None:
    cancelled, late, kept = (
        await store.batch(2),
        await store.batch(2, window_seconds=10),
        await store.batch(2),
    )
    await store.cancel(cancelled)
    await store.lead()
    assert [each.batch_id for each in (await store.window()).batches] == [late, kept]
    store.clock.advance(10)
    # Nobody has looked at the clock yet, and still no line of it starts.
    assert await store.cut((late, 2), (cancelled, 2)) == []
    assert [each.batch_id for each in (await store.window()).batches] == [kept]


async def test_cuts_are_contiguous_and_in_the_order_wanted(store: Store) -> None:
    one, two = await store.batch(5), await store.batch(3)
    dispatches = await store.cut(
        (two, 2), (one, 2), (two, 9), ("batch_unknown", 2), (one, 2), (two, 1)
    )
    assert [(each.batch_id, ranges_of(each.lines)) for each in dispatches] == [
        (two, [(0, 2)]),
        (one, [(0, 2)]),
        (two, [(2, 1)]),
        (one, [(2, 2)]),
    ]
    assert len({each.chunk_id for each in dispatches}) == 4
    assert all(each.dispatch == 1 and each.version == 1 for each in dispatches)
    (last,) = await store.cut((one, 100))
    assert ranges_of(last.lines) == [(4, 1)]
    assert await store.cut((one, 100)) == []


async def test_a_chunk_is_cut_by_bytes_and_holds_at_least_one_line(store: Store) -> None:
    lines = [chat_line(f"r{n}", "x" * (10_000 if n == 2 else 100)) for n in range(5)]
    batch_id = await store.batch(lines)
    size = len(lines[0]) - 1
    chunks = await store.cut(
        (batch_id, 5, 2 * size), (batch_id, 5, size), (batch_id, 5, 2 * size - 1)
    )
    assert [ranges_of(each.lines) for each in chunks] == [[(0, 2)], [(2, 1)], [(3, 1)]]
    assert [each.input_bytes for each in chunks] == [2 * size, len(lines[2]) - 1, size]
    assert [each.line_count for each in chunks] == [2, 1, 1]


async def test_a_trace_goes_on_in_the_dispatch(store: Store) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    file = await store.upload(chat_line("r0"))
    answer = await store.batches.CreateBatch(
        batches_pb2.CreateBatchRequest(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            completion_window_seconds=86_400,
        ),
        metadata=(*store.metadata, ("traceparent", parent)),
    )
    await store.validator.run_once()
    (dispatch,) = await store.cut((answer.batch.id, 1))
    assert dispatch.traceparent == parent


async def test_a_batch_whose_input_has_become_fewer_lines_holds_up_no_other(store: Store) -> None:
    batch_id, other = await store.batch(4), await store.batch(50)
    name, content = await input_taken(store, batch_id)
    # Its index is lost as well, and can only be made of what is there.
    await put_back(store, name, content.replace(b"\n", b" "))
    await taken(store, (await input_of(store, batch_id)).index_blob)

    async def told() -> bool:
        (dispatch,) = await store.cut((batch_id, 4), (other, 1))
        assert dispatch.batch_id == other
        return name in (await store.get(batch_id)).nightshift.reason

    await eventually(told)
    # It waits for the operator, and goes on.
    await taken(store, name)
    await put_back(store, name, content)
    store.clock.advance(5)
    _, token = await opened(store, batch_id, 4)
    assert len(await store.lines(token, [(0, 4)])) == 4


async def test_a_batch_whose_input_has_become_fewer_lines_can_be_cancelled(tmp_path: Path) -> None:
    async with running(tmp_path / "data") as store:
        batch_id = await store.batch(4)
        name, content = await input_taken(store, batch_id)
        await put_back(store, name, content.replace(b"\n", b" "))
        await taken(store, (await input_of(store, batch_id)).index_blob)
        await store.cancel(batch_id)
    # Started again, it has no index in mind.
    async with running(tmp_path / "data") as store:
        await store.turn()
        batch = await store.get(batch_id)
        assert batch.status == batches_pb2.BATCH_STATUS_CANCELLED
        assert [error.code for error in batch.errors] == ["input_lost"]
        _, error = await store.end_files(batch_id)
        assert [line["custom_id"] for line in error] == [None] * 4
