"""Cancel and expiry end every batch on time, keep what is finished, and account for every line."""

from dataclasses import replace

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, dispatch_pb2, files_pb2
from services.kit.wire.errors import ConflictError
from services.kit.wire.result_line import MESSAGES
from services.store.ending.ender import STOP_MS, Ender
from services.store.tables.core import outbox
from tests.integration.store_work.harness import Store
from tests.integration.store_work.worker import frame
from tests.kit.eventually import eventually
from tests.kit.store import chat_line

pytestmark = pytest.mark.integration

CANCELLING = batches_pb2.BATCH_STATUS_CANCELLING
CANCELLED = batches_pb2.BATCH_STATUS_CANCELLED
COMPLETED = batches_pb2.BATCH_STATUS_COMPLETED
EXPIRED = batches_pb2.BATCH_STATUS_EXPIRED
FINALIZING = batches_pb2.BATCH_STATUS_FINALIZING
IN_PROGRESS = batches_pb2.BATCH_STATUS_IN_PROGRESS


async def test_cancel_waits_for_executors_to_flush_but_not_longer_than_they_need(
    store: Store,
) -> None:
    batch_id = await store.batch(6)
    (dispatch,) = await store.cut((batch_id, 4))
    token = (await store.open(dispatch)).token
    asked = await store.cancel(batch_id)
    assert (asked.status, asked.HasField("output_file_id")) == (CANCELLING, False)
    await store.turn()
    # What was finished is flushed …
    assert await store.finish(token, [2, 0], batch_id, failed=[0]) == 2
    await store.turn()
    assert (await store.get(batch_id)).status == CANCELLING
    # … and with the last attempt the wait is over, with no time gone by.
    await store.hand_back(token)
    await store.turn()
    batch = await store.get(batch_id)
    assert (batch.status, batch.cancelled_at) == (CANCELLED, batch.cancelling_at)
    assert not batch.HasField("finalizing_at")
    assert batch.request_counts == batches_pb2.RequestCounts(total=6, completed=1, failed=1)
    output, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in output] == ["r2"]
    assert [line["custom_id"] for line in error] == ["r0", "r1", "r3", "r4", "r5"]
    assert error[0]["error"] is None
    for line in error[1:]:
        assert line["response"] is None
        assert line["error"] == {"code": "batch_cancelled", "message": MESSAGES["batch_cancelled"]}
    assert (await store.cancel(batch_id)) == batch


async def test_cancel_seals_after_two_seconds_whoever_is_silent(store: Store) -> None:
    batch_id = await store.batch(2)
    (dispatch,) = await store.cut((batch_id, 2))
    token = (await store.open(dispatch)).token
    await store.cancel(batch_id)
    store.clock.advance(1.9)
    # Asked again, it takes no longer.
    assert (await store.cancel(batch_id)).status == CANCELLING
    await store.turn()
    assert (await store.get(batch_id)).status == CANCELLING
    assert await store.finish(token, [1], batch_id) == 1
    store.clock.advance(0.1)
    await store.turn()
    assert (await store.get(batch_id)).status == CANCELLED
    (ack,) = await store.append(frame(token, batch_id, [0]))
    assert ack.sealed


async def test_executors_are_told_at_once_and_need_no_beat_for_it(store: Store) -> None:
    async def told(batch_id: str) -> list[int]:
        rows = await store.sql(sa.select(outbox.c.payload).order_by(outbox.c.id))
        events = [dispatch_pb2.Event.FromString(row.payload) for row in rows]
        return [event.kind for event in events if event.batch_id == batch_id][1:]

    cancelled, late = await store.batch(2), await store.batch(2, window_seconds=10)
    for batch_id in (cancelled, late):
        (dispatch,) = await store.cut((batch_id, 2))
        await store.open(dispatch)
    await store.cancel(cancelled)
    await store.cancel(cancelled)
    assert await told(cancelled) == [dispatch_pb2.EVENT_KIND_BATCH_CANCELLING]
    store.clock.advance(10)
    await store.turn()
    assert await told(late) == [dispatch_pb2.EVENT_KIND_BATCH_EXPIRING]


# contract: 83
async def test_a_batch_cancelled_while_validating_ends_without_files(store: Store) -> None:
    file = await store.upload(chat_line("r0"))
    batch = await store.create(file.id)
    assert (await store.cancel(batch.id)).status == CANCELLING
    await store.turn()
    ended = await store.get(batch.id)
    assert ended.status == CANCELLED
    assert not ended.HasField("output_file_id")
    assert not ended.HasField("error_file_id")
    assert not ended.HasField("in_progress_at")
    assert ended.request_counts == batches_pb2.RequestCounts()


async def test_all_lines_done_while_cancelling_still_ends_cancelled(store: Store) -> None:
    batch_id = await store.batch(2)
    (dispatch,) = await store.cut((batch_id, 2))
    token = (await store.open(dispatch)).token
    await store.cancel(batch_id)
    assert await store.finish(token, [0, 1], batch_id) == 2
    await store.finalizer.run_once()
    batch = await store.get(batch_id)
    assert batch.status == CANCELLED
    output, error = await store.end_files(batch_id)
    assert (len(output), error) == (2, [])


async def test_a_cancel_while_finalizing_ends_cancelled_with_all_results(store: Store) -> None:
    batch_id = await store.batch(2)
    (dispatch,) = await store.cut((batch_id, 2))
    await store.finish((await store.open(dispatch)).token, [0, 1], batch_id)
    assert (await store.get(batch_id)).status == FINALIZING
    assert (await store.cancel(batch_id)).status == CANCELLING
    await store.turn()
    batch = await store.get(batch_id)
    assert batch.status == CANCELLED
    assert batch.finalizing_at
    output, error = await store.end_files(batch_id)
    assert (len(output), error) == (2, [])


async def test_at_its_deadline_a_batch_keeps_what_is_done(store: Store) -> None:
    batch_id = await store.batch(5, window_seconds=10)
    (dispatch,) = await store.cut((batch_id, 3))
    token = (await store.open(dispatch)).token
    await store.finish(token, [1], batch_id, failed=[1])
    store.clock.advance(9.9)
    await store.turn()
    assert (await store.get(batch_id)).status == IN_PROGRESS
    store.clock.advance(0.1)
    await store.turn()
    assert (await store.get(batch_id)).status == IN_PROGRESS
    assert await store.finish(token, [2], batch_id) == 1
    store.clock.advance(2)
    await store.turn()
    batch = await store.get(batch_id)
    assert batch.status == EXPIRED
    assert batch.finalizing_at <= batch.expired_at
    assert batch.request_counts == batches_pb2.RequestCounts(total=5, completed=1, failed=1)
    output, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in output] == ["r2"]
    assert [line["custom_id"] for line in error] == ["r0", "r1", "r3", "r4"]
    assert {line["error"]["code"] for line in error if line["error"]} == {"batch_expired"}
    with pytest.raises(ConflictError, match="Cannot cancel a batch with status 'expired'"):
        await store.cancel(batch_id)


async def test_nothing_is_waited_for_when_nothing_runs(store: Store) -> None:
    batch_id = await store.batch(3, window_seconds=1)
    await store.cut((batch_id, 2))
    store.clock.advance(1)
    await store.turn()
    batch = await store.get(batch_id)
    assert batch.status == EXPIRED
    assert not batch.HasField("output_file_id")
    _, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in error] == ["r0", "r1", "r2"]


async def test_a_batch_that_is_never_validated_expires_too(store: Store) -> None:
    file = await store.upload(chat_line("r0"))
    batch = await store.create(file.id, window_seconds=1)
    store.clock.advance(1)
    await store.ender.run_once()
    ended = await store.get(batch.id)
    assert ended.status == EXPIRED
    assert ended.expired_at
    assert not ended.HasField("error_file_id")
    await store.turn()
    assert (await store.get(batch.id)) == ended


async def test_a_deadline_that_passes_while_cancelling_changes_nothing(store: Store) -> None:
    batch_id = await store.batch(3, window_seconds=10)
    (dispatch,) = await store.cut((batch_id, 2))
    await store.open(dispatch)
    store.clock.advance(9)
    await store.cancel(batch_id)
    store.clock.advance(1)
    await store.turn()
    assert (await store.get(batch_id)).status == CANCELLING
    store.clock.advance(1)
    await store.turn()
    batch = await store.get(batch_id)
    assert batch.status == CANCELLED
    _, error = await store.end_files(batch_id)
    assert {line["error"]["code"] for line in error} == {"batch_cancelled"}


async def test_all_lines_done_at_the_deadline_is_completed(store: Store) -> None:
    batch_id = await store.batch(2, window_seconds=10)
    (dispatch,) = await store.cut((batch_id, 2))
    token = (await store.open(dispatch)).token
    store.clock.advance(10)
    await store.turn()
    await store.finish(token, [0, 1], batch_id)
    await store.turn()
    assert (await store.get(batch_id)).status == COMPLETED


# contract: 70
async def test_the_ender_has_itself_woken_for_what_falls_due_before_its_next_turn(
    store: Store,
) -> None:
    """Its turns come each second: waiting for one would make each end up to that much late."""
    woken: list[str] = []
    context = replace(store.context, wake=woken.append)
    ender = Ender(context)
    stopping, late = await store.batch(1), await store.batch(1, window_seconds=60)
    (dispatch,) = await store.cut((stopping, 1))
    await store.open(dispatch)
    await store.cancel(stopping)
    await ender.run_once()
    assert woken == []
    for wait_seconds in (STOP_MS / 1000 - 0.05, 57.95):
        store.clock.advance(wait_seconds)
        await ender.run_once()
        await eventually(lambda: "ender" in woken)
        store.clock.advance(0.05)
        await ender.run_once()
        woken.clear()
    await store.turn()
    assert (await store.get(stopping)).status == CANCELLED
    assert (await store.get(late)).status == EXPIRED


async def test_end_files_expire_after_they_were_made(store: Store) -> None:
    file = await store.upload(chat_line("r0"))
    ids = []
    for seconds in (None, 3_600):
        after = None
        if seconds:
            after = files_pb2.ExpiresAfter(anchor="created_at", seconds=seconds)
        answer = await store.batches.CreateBatch(
            batches_pb2.CreateBatchRequest(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                completion_window_seconds=86_400,
                output_expires_after=after,
            ),
            metadata=store.metadata,
        )
        ids.append(answer.batch.id)
    await store.validator.run_once()
    store.clock.advance(100)
    for batch_id, expiry in zip(ids, (2_592_000, 3_600), strict=True):
        (dispatch,) = await store.cut((batch_id, 1))
        await store.finish((await store.open(dispatch)).token, [0], batch_id)
        await store.turn()
        batch = await store.get(batch_id)
        found = await store.files.GetFile(
            files_pb2.GetFileRequest(file_id=batch.output_file_id), metadata=store.metadata
        )
        assert found.file.created_at == batch.completed_at == batch.created_at + 100
        assert found.file.expires_at - found.file.created_at == expiry
        assert found.file.filename == f"{batch_id}_output.jsonl"
        assert (found.file.purpose, found.file.status) == ("batch_output", "processed")
