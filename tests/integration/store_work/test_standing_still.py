"""What stood still, or died, at a step and went on: cases that any order has come upon."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, files_pb2
from services.kit.wire.errors import UnavailableError
from services.store.domain.retry_budget import MOST_VALIDATIONS
from services.store.tables.core import blobs
from tests.integration.store_work.crashing import Fleet, Gate, Member, SQLiteGround
from tests.integration.store_work.ops import BIG
from tests.integration.store_work.worker import frame
from tests.kit import data_at_rest
from tests.kit.store import chat_line

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("patient_clients")]

DAY_SECONDS = 25 * 3_600
VALIDATING = batches_pb2.BATCH_STATUS_VALIDATING
CANCELLING = batches_pb2.BATCH_STATUS_CANCELLING
CANCELLED = batches_pb2.BATCH_STATUS_CANCELLED


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(SQLiteGround(tmp_path / "template"), tmp_path / "data")
    await fleet.start()
    yield fleet
    await fleet.stop()


async def stopped(
    member: Member, place: str, call: Awaitable[Any]
) -> tuple[Gate, "asyncio.Future[Any]"]:
    """Begin a call and return once it stands still."""
    gate = member.plan.freeze_at(place)
    task = asyncio.ensure_future(call)
    await gate.reached.wait()
    return gate, task


async def opened(member: Member, lines: int) -> tuple[str, str]:
    """Begin a batch; return its id and an attempt's token."""
    store = member.store
    batch_id = await store.batch(lines)
    (dispatch,) = await store.cut((batch_id, lines))
    return batch_id, (await store.open(dispatch)).token


async def test_a_cancel_that_waited_still_gives_executors_their_time(fleet: Fleet) -> None:
    (member,) = fleet.members
    batch_id, token = await opened(member, 2)
    gate, cancel = await stopped(member, "batch.cancel:before", member.store.cancel(batch_id))
    fleet.clock.advance(5)
    await member.store.beat({token: []})
    gate.open.set()
    await cancel
    await member.store.ender.run_once()
    assert (await member.store.get(batch_id)).status == CANCELLING
    assert await member.store.finish(token, [1], batch_id) == 1
    fleet.clock.advance(2)
    await member.store.turn()
    batch = await member.store.get(batch_id)
    assert (batch.status, batch.request_counts.completed) == (CANCELLED, 1)
    assert batch.cancelling_at - batch.in_progress_at == 5


async def test_a_cancel_while_its_input_is_judged_is_not_undone(fleet: Fleet) -> None:
    (member,) = fleet.members
    store = member.store
    file = await store.upload(chat_line("r0"))
    batch_id = (await store.create(file.id)).id
    judging = store.validator.run_once()
    gate, judged = await stopped(member, "batch.start:before", judging)
    assert (await store.cancel(batch_id)).status == CANCELLING
    gate.open.set()
    await judged
    assert (await store.get(batch_id)).status == CANCELLING
    await store.turn()
    batch = await store.get(batch_id)
    assert (batch.status, batch.HasField("in_progress_at")) == (CANCELLED, False)


async def test_an_input_that_ends_each_store_is_given_up(fleet: Fleet) -> None:
    (member,) = fleet.members
    file = await member.store.upload(chat_line("r0"))
    batch_id = (await member.store.create(file.id)).id
    deaths = 0
    while (await member.store.get(batch_id)).status == VALIDATING:
        assert deaths < 20
        member.plan.crash_at("batch.start:before")
        judging = asyncio.create_task(member.store.validator.run_once())
        death = asyncio.create_task(member.plan.died.wait())
        await asyncio.wait({judging, death}, return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        deaths += member.plan.died.is_set()
        await asyncio.wait({judging})
        assert isinstance(judging.exception(), UnavailableError | None)
        await member.crash()
        fleet.clock.advance(700)
    batch = await member.store.get(batch_id)
    assert [error.code for error in batch.errors] == ["server_error"]
    assert deaths == MOST_VALIDATIONS


@pytest.mark.parametrize("sealed", [False, True])
async def test_a_frame_that_was_swept_before_it_was_written_leaves_nothing(
    fleet: Fleet, sealed: bool
) -> None:
    (member,) = fleet.members
    store = member.store
    batch_id, token = await opened(member, 1)
    late = store.append(frame(token, batch_id, [0], answer=BIG))
    gate, append = await stopped(member, "result.announce:after", late)
    if sealed:
        await store.cancel(batch_id)
        fleet.clock.advance(2)
        await store.turn()
    fleet.clock.advance(DAY_SECONDS)
    # Its row is doomed, deleted in vain, and forgotten.
    await store.sweeper.run_once()
    gate.open.set()
    if sealed:
        (answer,) = await append
        assert answer.sealed
    else:
        with pytest.raises(UnavailableError, match="was dropped; try again"):
            await append
        await store.hand_back(token)
    await store.sweeper.run_once()
    await store.sweeper.run_once()
    assert not [path for path in (fleet.folder / "blobs").rglob("segment/*") if path.is_file()]


@pytest.mark.parametrize("place", ["sweep.delete_blob:before", "sweep.delete_blob:after"])
async def test_what_is_written_while_it_is_swept_leaves_nothing(fleet: Fleet, place: str) -> None:
    (member,) = fleet.members
    store = member.store
    uploading = store.upload(chat_line("r0"))
    writes, upload = await stopped(member, "file.index_write:before", uploading)
    fleet.clock.advance(DAY_SECONDS)
    # Doomed, deleted perhaps, and not forgotten yet, when the writer goes on and gives it up.
    deletes, sweep = await stopped(member, place, store.sweeper.run_once())
    writes.open.set()
    with pytest.raises(UnavailableError, match="was dropped; try again"):
        await upload
    # It gives up behind its answer, and the writer works in order.
    await store.context.db.probe()
    deletes.open.set()
    await sweep
    # What is given up at the moment of an earlier doom counts as given up after it.
    fleet.clock.advance(1)
    await store.sweeper.run_once()
    assert not [path for path in (fleet.folder / "blobs").rglob("*") if path.is_file()]
    assert await store.sql(sa.select(blobs)) == []


async def test_a_store_that_dies_between_an_end_and_its_clearing_leaves_no_fault(
    fleet: Fleet,
) -> None:
    (member,) = fleet.members
    batch_id, token = await opened(member, 1)
    await member.store.finish(token, [0], batch_id, answer=BIG)
    member.plan.crash_at("finalize.end:after")
    turn = asyncio.create_task(member.store.finalizer.run_once())
    await member.plan.died.wait()
    await asyncio.wait([turn])
    assert isinstance(turn.exception(), UnavailableError | None)
    await member.crash()
    assert (await member.store.get(batch_id)).status == batches_pb2.BATCH_STATUS_COMPLETED
    found = await asyncio.to_thread(data_at_rest.check, fleet.folder, deep=True)
    assert not found.faults, found.faults


async def test_chunks_are_cut_where_another_batch_has_ended_and_its_input_is_gone(
    fleet: Fleet,
) -> None:
    (member,) = fleet.members
    store = member.store
    ended = await store.batch(1)
    await store.cancel(ended)
    await store.turn()
    input_id = (await store.get(ended)).input_file_id
    request = files_pb2.DeleteFileRequest(file_id=input_id)
    await store.files.DeleteFile(request, metadata=store.metadata)
    await store.sweeper.run_once()
    await store.sweeper.run_once()
    # As one that has the window of a moment ago, and an index that nobody remembers.
    await member.crash()
    open_one = await member.store.batch(1)
    (dispatch,) = await member.store.cut((ended, 1), (open_one, 1))
    assert dispatch.batch_id == open_one
