"""Streams of a batch's events: each line once, wherever they break off; the state, in order."""

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, events_pb2, files_pb2
from services.kit.wire.errors import InvalidRequestError, NotFoundError
from services.store.batches.batches_repo import KEEP_SECONDS
from services.store.events import events_servicer, shared_reads
from services.store.events.event_segments import PAGE_BYTES
from services.store.tables.core import segments
from tests.integration.store_work.following import Stream, ids, started
from tests.integration.store_work.harness import Store, running
from tests.integration.store_work.worker import frame, in_pieces
from tests.kit.eventually import eventually
from tests.kit.store import chat_line

pytestmark = pytest.mark.integration

CANCELLED = batches_pb2.BATCH_STATUS_CANCELLED
CANCELLING = batches_pb2.BATCH_STATUS_CANCELLING
COMPLETED = batches_pb2.BATCH_STATUS_COMPLETED
FAILED = batches_pb2.BATCH_STATUS_FAILED
IN_PROGRESS = batches_pb2.BATCH_STATUS_IN_PROGRESS
MIB = 1024 * 1024


async def test_state_and_lines_come_once_and_in_order(store: Store) -> None:
    batch_id, token = await started(store, 5)
    stream = await Stream(store, batch_id).drain()
    assert (stream.told(), stream.status()) == ([], IN_PROGRESS)
    first_state = stream.states[0][0]

    await store.append(frame(token, batch_id, [3, 1], failed=[1]))
    await stream.drain()
    assert stream.told() == ids(3, 1)
    counts = stream.states[-1][1].request_counts
    assert (counts.completed, counts.failed, counts.total) == (1, 1, 5)
    assert int(stream.states[-1][0]) > int(first_state)
    assert not (await stream.ask()).events

    # Of a frame that repeats a line only what is new is told.
    await store.append(frame(token, batch_id, [1, 0, 3, 4, 2]))
    await store.turn()
    await stream.drain()
    assert stream.told() == ids(3, 1, 0, 4, 2)
    assert stream.ended
    assert (stream.status(), stream.resets) == (COMPLETED, 0)
    last = stream.states[-1][1]
    assert last.output_file_id
    assert last.request_counts.completed + last.request_counts.failed == 5
    # What was streamed is what stands in the files.
    output, error = await store.end_files(batch_id)
    streamed = {line["custom_id"]: line for line in map(orjson.loads, dict(stream.lines).values())}
    assert streamed == {line["custom_id"]: line for line in [*output, *error]}

    # Who has the end already is told it again, so that nobody waits for it.
    again = await Stream(store, batch_id, after=stream.after).drain()
    assert (again.told(), again.status(), again.ended) == ([], COMPLETED, True)


async def test_without_results_only_the_state_is_told(store: Store) -> None:
    batch_id, token = await started(store, 2)
    stream = await Stream(store, batch_id, results=False).drain()
    await store.finish(token, [0], batch_id)
    await stream.drain()
    await store.finish(token, [1], batch_id)
    await store.turn()
    await stream.drain()
    assert stream.lines == []
    assert [batch.request_counts.completed for _, batch in stream.states] == [0, 1, 2]
    assert stream.ended
    assert [int(each) for each, _ in stream.states] == sorted(int(e) for e, _ in stream.states)
    # Nobody reads its results, so they are not kept.
    assert await store.sql(sa.select(segments.c.id)) == []


async def test_a_stream_goes_on_behind_any_event_while_it_runs_and_after(store: Store) -> None:
    batch_id, token = await started(store, 40)
    order = random.Random(1).sample(range(40), 40)
    stream = Stream(store, batch_id)
    await store.append(frame(token, batch_id, order[:9], number=1))
    await store.append(frame(token, batch_id, order[9:23], number=2))
    await stream.drain()
    for at, (event_id, _) in enumerate(stream.lines):
        resumed = await Stream(store, batch_id, after=event_id).drain()
        assert resumed.lines == stream.lines[at + 1 :]
    await store.append(frame(token, batch_id, order[23:], number=3))
    await store.turn()
    await stream.drain()
    assert stream.told() == [f"r{number}" for number in order]
    assert stream.ended
    for at in range(0, 40, 7):
        resumed = await Stream(store, batch_id, after=stream.lines[at][0]).drain()
        assert resumed.lines == stream.lines[at + 1 :]
        assert (resumed.status(), resumed.resets) == (COMPLETED, 0)


async def test_what_never_ran_is_told_at_the_end(store: Store) -> None:
    batch_id, token = await started(store, 300)
    stream = await Stream(store, batch_id).drain()
    await store.append(frame(token, batch_id, [7, 5], failed=[5]))
    await store.cancel(batch_id)
    await stream.drain()
    assert stream.status() == CANCELLING
    await store.hand_back(token)
    await store.turn()
    await stream.drain()
    assert stream.ended
    assert stream.status() == CANCELLED
    rest = [number for number in range(300) if number not in (5, 7)]
    assert stream.told() == ids(7, 5, *rest)
    # Also there a stream goes on behind each line, and the failed one is not told twice.
    for at in (2, 3, 150, 301 - 2):
        resumed = await Stream(store, batch_id, after=stream.lines[at][0]).drain()
        assert resumed.lines == stream.lines[at + 1 :]
        assert resumed.status() == CANCELLED


async def test_a_line_longer_than_a_page_comes_in_pieces(store: Store) -> None:
    batch_id, token = await started(store, 4)
    stream = Stream(store, batch_id)
    long = frame(token, batch_id, [1], answer="x" * (2 * PAGE_BYTES + 5))
    for each in (
        frame(token, batch_id, [0]),
        long,
        frame(token, batch_id, [2], answer="y" * PAGE_BYTES),
    ):
        await store.append(each)
    await stream.drain()
    assert stream.told() == ids(0, 1, 2)
    assert stream.lines[1][1] + b"\n" == long.payload
    assert stream.largest <= PAGE_BYTES
    resumed = await Stream(store, batch_id, after=stream.lines[0][0]).drain()
    assert resumed.lines == stream.lines[1:]
    # The same from the files.
    await store.finish(token, [3], batch_id, failed=[3])
    await store.turn()
    late = await Stream(store, batch_id).drain()
    assert late.told() == ids(0, 1, 2, 3)
    assert late.lines[1][1] == stream.lines[1][1]
    assert (late.largest <= PAGE_BYTES, late.resets, late.status()) == (True, 0, COMPLETED)
    resumed = await Stream(store, batch_id, after=late.lines[1][0]).drain()
    assert resumed.lines == late.lines[2:]


async def test_many_lines_of_large_and_small_segments(store: Store) -> None:
    """Segments in rows and in blobs, more than a page each and more than a page in number."""
    lines = 3_000
    batch_id, token = await started(store, lines)
    order = random.Random(5).sample(range(lines), lines)
    stream = Stream(store, batch_id)
    at = number = 0
    while at < lines:
        count, answer = (400, "z" * 1_500) if number % 5 == 0 else (9, "ok")
        number += 1
        some = order[at : at + count]
        # Every other frame also repeats a line that has its result.
        repeated = [order[0]] if number % 2 == 0 else []
        await store.append(frame(token, batch_id, [*repeated, *some], number=number, answer=answer))
        at += count
        if number % 7 == 0:
            await stream.ask()
    await store.turn()
    await stream.drain()
    assert stream.told() == ids(*order)
    assert (stream.ended, stream.resets) == (True, 0)


async def test_long_after_the_end_a_stream_starts_over_and_says_so(store: Store) -> None:
    batch_id, token = await started(store, 6)
    stream = Stream(store, batch_id)
    await store.append(frame(token, batch_id, [4, 2], failed=[2]))
    await stream.drain()
    await store.append(frame(token, batch_id, [0, 1, 3, 5]))
    await store.turn()
    assert len(await store.sql(sa.select(segments.c.id))) == 2

    store.clock.advance(KEEP_SECONDS - 61)
    await store.turn()
    resumed = await Stream(store, batch_id, after=stream.after).drain()
    assert (resumed.told(), resumed.resets) == (ids(0, 1, 3, 5), 0)

    store.clock.advance(62)
    await store.turn()
    assert await store.sql(sa.select(segments.c.id)) == []
    resumed = await Stream(store, batch_id, after=stream.after).drain()
    assert (resumed.told(), resumed.resets) == (ids(0, 1, 3, 4, 5, 2), 1)
    assert (resumed.status(), resumed.ended) == (COMPLETED, True)
    # Once begun over it goes on, also behind the reset itself, and says so no more.
    page = await (late := Stream(store, batch_id, after=stream.after)).ask()
    assert late.after == page.events[0].reset.event_id
    await late.drain()
    for at in range(6):
        on = await Stream(store, batch_id, after=late.lines[at][0]).drain()
        assert (on.lines, on.resets) == (late.lines[at + 1 :], 0)
    # Who had everything needs nothing of it.
    done = await Stream(store, batch_id, after=late.states[-1][0]).drain()
    assert (done.told(), done.resets, done.ended) == ([], 0, True)


async def test_a_stream_of_what_has_ended_reads_the_files(store: Store) -> None:
    batch_id, token = await started(store, 3)
    await store.append(frame(token, batch_id, [2, 0, 1], failed=[0]))
    await store.turn()
    stream = await Stream(store, batch_id).drain()
    assert (stream.told(), stream.resets, stream.status()) == (ids(1, 2, 0), 0, COMPLETED)
    # A file that its owner deleted is told no more.
    file_id = stream.states[-1][1].output_file_id
    await store.files.DeleteFile(
        files_pb2.DeleteFileRequest(file_id=file_id), metadata=store.metadata
    )
    assert (await Stream(store, batch_id).drain()).told() == ids(0)


async def test_a_batch_that_fails_tells_why_and_ends(store: Store) -> None:
    file = await store.upload(b"{}\n")
    batch = await store.create(file.id)
    stream = await Stream(store, batch.id).drain()
    assert stream.status() == batches_pb2.BATCH_STATUS_VALIDATING
    await store.validator.run_once()
    await stream.drain()
    assert (stream.status(), stream.ended, stream.lines) == (FAILED, True, [])
    assert stream.states[-1][1].errors


async def test_a_reader_waits_until_something_happens(store: Store) -> None:
    batch_id, token = await started(store, 2)
    stream = await Stream(store, batch_id).drain()
    waiting = asyncio.create_task(stream.ask(wait_ms=20_000))
    await eventually(lambda: batch_id in store.hub._waiting)
    # A turn without news wakes nobody.
    assert await store.hub.run_once() == 0
    await store.finish(token, [1], batch_id)
    assert await store.hub.run_once() == 1
    await waiting
    assert stream.told() == ids(1)

    assert not (await stream.ask(wait_ms=1)).events
    assert not store.hub._waiting
    # A store that stops sends everybody away.
    waiting = asyncio.create_task(stream.ask(wait_ms=20_000))
    await eventually(lambda: batch_id in store.hub._waiting)
    store.hub.close()
    assert not (await waiting).events


@pytest.mark.parametrize("results", [False, True], ids=["states", "results"])
async def test_all_watchers_of_a_batch_share_its_reads(
    store: Store, results: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Once for a moment, which on a busy machine may be over before all had their turn.
    monkeypatch.setattr(events_servicer, "KEPT_SECONDS", 60.0)
    monkeypatch.setattr(shared_reads, "KEPT_SECONDS", 60.0)
    batch_id, token = await started(store, 2)
    streams = [Stream(store, batch_id, results=results) for _ in range(25)]
    for stream in streams:
        await stream.drain()
    waiting = [asyncio.create_task(stream.ask(wait_ms=20_000)) for stream in streams]
    await eventually(lambda: len(store.hub._waiting.get(batch_id, ())) == len(streams))
    await store.append(frame(token, batch_id, [1]))
    reads = 0
    read = store.context.db.read

    async def counted(statement: Any) -> Any:
        nonlocal reads
        reads += 1
        return await read(statement)

    monkeypatch.setattr(store.context.db, "read", counted)
    assert await store.hub.run_once() == len(streams)
    await asyncio.gather(*waiting)
    # The hub's look, the page, and what the batch waits for.
    assert reads == 3
    for stream in streams:
        assert stream.told() == (ids(1) if results else [])
        assert stream.states[-1][1].request_counts.completed == 1


async def test_the_stream_is_made_of_the_pages(store: Store) -> None:
    batch_id, token = await started(store, 2)
    await store.finish(token, [1, 0], batch_id)
    call = store.events.WatchBatch(
        events_pb2.WatchBatchRequest(batch_id=batch_id, include_results=True),
        metadata=store.metadata,
    )

    async def told() -> Any:
        return await call.read()

    first = await told()
    assert first.results.lines.count(b"\n") == 2
    assert (await told()).state.batch.status == batches_pb2.BATCH_STATUS_FINALIZING
    await eventually(lambda: batch_id in store.hub._waiting)
    await store.turn()
    await store.hub.run_once()
    assert (await told()).state.batch.status == COMPLETED
    assert await told() is grpc.aio.EOF


@pytest.mark.parametrize("after", ["nonsense", "99", "99.1", "o0", "e7"])
async def test_ids_of_no_event(store: Store, after: str) -> None:
    batch_id = await store.batch(1)
    with pytest.raises(InvalidRequestError, match=after) as refused:
        await Stream(store, batch_id, after=after).ask()
    assert (refused.value.param, refused.value.code) == ("after", "invalid_value")


async def test_places_that_no_result_has(store: Store) -> None:
    batch_id, token = await started(store, 3)
    await store.append(frame(token, batch_id, [0, 1]))
    stream = await Stream(store, batch_id).drain()
    commit = stream.lines[0][0].partition(".")[0]
    length = len(stream.lines[0][1]) + 1
    for after in ("3", "2.1", f"1.{length}", f"0.{length}"):
        with pytest.raises(InvalidRequestError, match=f"{commit}.{after}"):
            await Stream(store, batch_id, after=f"{commit}.{after}").ask()
    rest = await Stream(store, batch_id, after=f"{commit}.0.{length - 1}").drain()
    assert rest.lines == [(f"{commit}.1", b""), stream.lines[1]]


async def test_other_projects_and_unknown_batches(store: Store) -> None:
    batch_id = await store.batch(1)
    with pytest.raises(NotFoundError):
        await Stream(store, "batch_none").ask()
    store.project_id = "other"
    with pytest.raises(NotFoundError, match=batch_id):
        await Stream(store, batch_id).ask()


async def test_a_store_that_is_started_again_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path / "data") as store:
        batch_id, token = await started(store, 3)
        stream = Stream(store, batch_id)
        await store.append(frame(token, batch_id, [2]))
        await stream.drain()
    async with running(tmp_path / "data") as store:
        stream.store = store
        await store.append(frame(token, batch_id, [0, 1]))
        await store.turn()
        await stream.drain()
        assert (stream.told(), stream.status()) == (ids(2, 0, 1), COMPLETED)


async def test_results_in_several_messages_are_one_line(store: Store) -> None:
    """A line of many frames, as its executor sends it."""
    batch_id, token = await started(store, 1)
    whole = frame(token, batch_id, [0], answer="w" * (3 * MIB))
    await store.append(*in_pieces(whole))
    stream = await Stream(store, batch_id).drain()
    assert stream.lines[0][1] + b"\n" == whole.payload


async def test_input_lines_of_any_text_come_through(store: Store) -> None:
    """Custom ids with what some split lines at."""
    names = ["plain", "\u2028line", "tab\t", 'q"uote', "\\n"]
    batch_id = await store.batch([chat_line(name) for name in names])
    await store.cancel(batch_id)
    await store.turn()
    stream = await Stream(store, batch_id).drain()
    assert stream.told() == names
