"""Stored content that is gone while it is needed: who waits, who is told what, how it ends."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, dispatch_pb2, events_pb2, files_pb2
from services.kit.errors import LostError, NotFoundError
from services.store import doctor, salvage
from services.store.models import batches, blobs, files, segments
from services.store.results_repo import INLINE_BYTES
from services.store.settings import StoreSettings
from tests.integration.store_work.harness import Store, databases
from tests.kit import uploads
from tests.kit.store import chat_line, our_errors

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

CANCELLING = batches_pb2.BATCH_STATUS_CANCELLING
IN_PROGRESS = batches_pb2.BATCH_STATUS_IN_PROGRESS
CANCELLED = batches_pb2.BATCH_STATUS_CANCELLED
COMPLETED = batches_pb2.BATCH_STATUS_COMPLETED
EXPIRED = batches_pb2.BATCH_STATUS_EXPIRED
FAILED = batches_pb2.BATCH_STATUS_FAILED
FINALIZING = batches_pb2.BATCH_STATUS_FINALIZING
VALIDATING = batches_pb2.BATCH_STATUS_VALIDATING
DAY = 86_400


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look again at once for what is missing."""
    monkeypatch.setattr(salvage, "CONFIRM_SECONDS", 0.01)


async def input_of(store: Store, batch_id: str) -> Any:
    """The row of a batch's input file."""
    (row,) = await store.sql(
        sa.select(files)
        .join(batches, batches.c.input_file_id == files.c.id)
        .where(batches.c.id == batch_id)
    )
    return row


async def taken(store: Store, name: str) -> bytes:
    """Delete a blob behind the store's back; return what it held."""
    content = await store.context.blobs.read(name, 0, 1 << 24)
    await store.context.blobs.delete("test.step", name)
    return content


async def put_back(store: Store, name: str, content: bytes) -> None:
    await store.context.blobs.put("test.step", name, content)


async def input_taken(store: Store, batch_id: str) -> tuple[str, bytes]:
    """Delete the whole content of a batch's input; return the blob's name and what it held."""
    ((name, _),) = (await input_of(store, batch_id)).parts
    return name, await taken(store, name)


async def opened(store: Store, batch_id: str, lines: int) -> tuple[dispatch_pb2.Dispatch, str]:
    (dispatch,) = await store.cut((batch_id, lines))
    return dispatch, (await store.open(dispatch)).token


# --- the line index ---------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 100, None], ids=["missing", "damaged", "cut short"])
async def test_a_line_index_is_made_again_of_the_input(store: Store, kept: int | None) -> None:
    batch_id = await store.batch(5)
    other = await store.batch(1)
    old = (await input_of(store, batch_id)).index_blob
    content = await taken(store, old)
    if kept != 0:
        await put_back(store, old, b"x" * 100 if kept else content[:-7])
    _, token = await opened(store, batch_id, 3)
    assert set(await store.lines(token, [(0, 3)])) == {0, 1, 2}

    # It has another name now, which all that named the old one know.
    new = (await input_of(store, batch_id)).index_blob
    assert new != old
    # All but the key of the hashes of custom ids.
    assert len(await store.context.blobs.read(new, 0, 1 << 20)) == len(content)
    query = sa.select(batches.c.index_blob).where(batches.c.id == batch_id)
    assert await store.sql(query) == [(new,)]
    await store.sweeper.run_once()
    assert await store.sql(sa.select(blobs.c.state).where(blobs.c.name == old)) == []
    assert (await store.get(batch_id)).nightshift.reason == ""

    await store.finish(token, [0, 1, 2], batch_id)
    _, token = await opened(store, batch_id, 9)
    await store.finish(token, [3, 4], batch_id)
    await store.cancel(other)
    await store.turn()
    assert (await store.get(batch_id)).status == COMPLETED
    assert [line["custom_id"] for line in (await store.end_files(batch_id))[0]] == [
        f"r{number}" for number in range(5)
    ]


async def test_an_index_is_made_again_for_a_new_batch_too(store: Store) -> None:
    file = await store.upload(chat_line("r0") + b"\n\n" + chat_line("r0"))
    (row,) = await store.sql(sa.select(files.c.index_blob).where(files.c.id == file.id))
    await taken(store, row.index_blob)
    batch = await store.create(file.id)
    await store.turn()
    failed = await store.get(batch.id)
    assert failed.status == FAILED
    assert [(error.code, error.line) for error in failed.errors] == [("duplicate_custom_id", 4)]


# --- the input of a batch that runs -------------------------------------------------------------


async def test_a_batch_without_its_input_waits_and_says_why(store: Store) -> None:
    batch_id, other = await store.batch(4), await store.batch(1)
    dispatch, token = await opened(store, batch_id, 2)
    file = await input_of(store, batch_id)
    name, content = await input_taken(store, batch_id)
    for pause in (5, 10, 20, 40, 80, 160, 300, 300):
        with pytest.raises(LostError) as told:
            await store.lines(token, [(0, 2)])
        assert told.value.code == "input_lost"
        reason = (await store.get(batch_id)).nightshift.reason
        assert reason == told.value.message
        assert file.id in reason
        assert name in reason
        assert "nightshift doctor --check" in reason

        # It is handed out no more for a while, and keeps nobody.
        await store.lead()
        assert [batch.batch_id for batch in (await store.window()).batches] == [other]
        assert await store.cut((batch_id, 1)) == []
        answer = await store.deliver(dispatch, delivered=2)
        assert answer.busy.retry_after_ms == pause * 1000
        assert await store.beat({token: []}) != {}
        await store.hand_back(token)
        store.clock.advance(pause - 1)
        assert await store.reclaim() == []
        store.clock.advance(1)
        (dispatch,) = await store.reclaim()
        token = (await store.open(dispatch)).token

    await put_back(store, name, content)
    assert set(await store.lines(token, [(0, 2)])) == {0, 1}
    batch = await store.get(batch_id)
    assert (batch.status, batch.nightshift.reason) == (IN_PROGRESS, "")
    await store.finish(token, [0, 1], batch_id)
    _, token = await opened(store, batch_id, 2)
    await store.finish(token, [2, 3], batch_id)
    await store.turn()
    assert (await store.get(batch_id)).status == COMPLETED


async def test_nothing_is_cut_of_what_cannot_be_read(store: Store) -> None:
    batch_id, other = await store.batch(2), await store.batch(2)
    name, content = await input_taken(store, batch_id)
    index = (await input_of(store, batch_id)).index_blob
    await taken(store, index)
    (dispatch,) = await store.cut((batch_id, 1), (other, 1))
    assert dispatch.batch_id == other
    assert name in (await store.get(batch_id)).nightshift.reason
    await store.lead()
    assert [batch.batch_id for batch in (await store.window()).batches] == [other]
    await put_back(store, name, content)
    store.clock.advance(5)
    _, token = await opened(store, batch_id, 2)
    assert len(await store.lines(token, [(0, 2)])) == 2
    assert (await store.get(batch_id)).nightshift.reason == ""


@pytest.mark.parametrize("end", [CANCELLED, EXPIRED])
async def test_it_ends_when_it_is_told_to_with_what_is_there(store: Store, end: int) -> None:
    batch_id = await store.batch([chat_line(f"r{number}", "x" * 200) for number in range(6)])
    _, token = await opened(store, batch_id, 3)
    await store.finish(token, [0, 2], batch_id, failed=[2])
    await input_taken(store, batch_id)
    await taken(store, (await input_of(store, batch_id)).index_blob)
    with pytest.raises(LostError):
        await store.lines(token, [(1, 1)])
    if end == CANCELLED:
        await store.cancel(batch_id)
    else:
        store.clock.advance(DAY)
        await store.turn()
    store.clock.advance(2)
    await store.turn()

    batch = await store.get(batch_id)
    assert batch.status == end
    assert batch.nightshift.reason == ""
    assert [error.code for error in batch.errors] == ["input_lost"]
    assert batch.input_file_id in batch.errors[0].message
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 1, 1)
    output, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in output] == ["r0"]
    # Each line once, in order; without its name, it says which one it is.
    assert [line["custom_id"] for line in error] == [None, "r2", None, None, None]
    code = "batch_cancelled" if end == CANCELLED else "batch_expired"
    assert [(line["error"] or {}).get("code") for line in error] == [code, None, code, code, code]
    for line, number in zip(error, (2, None, 4, 5, 6), strict=True):
        assert number is None or f"Request {number} of the input" in line["error"]["message"]

    # A stream tells them as lines that never ran.
    assert await told_lines(store, batch_id) == [*output, *error]
    # The mend that the check gives: the file goes, and all is well.
    with our_errors():
        await store.files.DeleteFile(
            files_pb2.DeleteFileRequest(file_id=batch.input_file_id), metadata=store.metadata
        )
    await store.sweeper.run_once()
    assert await checked(store) == []


async def told_lines(store: Store, batch_id: str) -> list[Any]:
    """What a stream from the start tells of an ended batch."""
    watch = events_pb2.WatchBatchRequest(batch_id=batch_id, include_results=True)
    lines, ended = b"", False
    while not ended:
        with our_errors():
            page = await store.events.ReadBatchEvents(
                events_pb2.ReadBatchEventsRequest(watch=watch), metadata=store.metadata
            )
        lines += b"".join(event.results.lines for event in page.events)
        watch.after, ended = page.next, page.ended
    return [orjson.loads(line) for line in lines.splitlines()]


async def checked(store: Store) -> list[dict[str, object]]:
    """What a check that reads everything finds at fault."""
    data = store.context.settings.data_dir
    await asyncio.to_thread((data / "secret").chmod, 0o600)
    settings = StoreSettings(data_dir=data, database_url=databases.of(data))
    said: list[dict[str, object]] = []
    await asyncio.to_thread(doctor.check, settings, said.append, deep=True)
    return [each for each in said if each["event"] == "fault"]


@pytest.mark.parametrize("gone", [0, 1])
async def test_what_is_left_of_an_input_in_parts_is_named(store: Store, gone: int) -> None:
    texts = [chat_line(f"r{number}") for number in range(6)]
    pieces = [b"".join(texts[:3]), b"".join(texts[3:])]
    upload = await uploads.create(store, sum(map(len, pieces)))
    parts = [await uploads.add(store, upload.id, piece) for piece in pieces]
    done = await uploads.complete(store, upload.id, parts)
    batch = await store.create(done.file.id)
    await store.turn()
    name, _ = (await input_of(store, batch.id)).parts[gone]
    await taken(store, name)
    await store.cancel(batch.id)
    await store.turn()
    _, error = await store.end_files(batch.id)
    named = [line["custom_id"] for line in error]
    known = [f"r{number}" for number in range(6)]
    known[3 * gone : 3 * gone + 3] = [None, None, None]
    assert named == known


async def test_lines_that_are_not_what_they_were_have_no_name(store: Store) -> None:
    batch_id = await store.batch(4)
    name, content = await input_taken(store, batch_id)
    await put_back(store, name, content.replace(b'"r2"', b"\0\0\0\0"))
    await store.cancel(batch_id)
    await store.turn()
    batch = await store.get(batch_id)
    assert [error.code for error in batch.errors] == ["input_lost"]
    _, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in error] == ["r0", "r1", None, "r3"]


async def test_suspects_of_others_need_not_wait_for_it(store: Store) -> None:
    lost, sound = await store.batch(2), await store.batch(2)
    tokens = [(await opened(store, batch_id, 2))[1] for batch_id in (lost, sound)]
    await store.died({token: [(0, 1)] for token in tokens})
    first, *_ = [each for each in await store.reclaim() if each.alone]
    assert first.batch_id == lost
    await input_taken(store, lost)
    token = (await store.open(first, delivered=1)).token
    with pytest.raises(LostError):
        await store.lines(token, [(0, 1)])
    second, *_ = [each for each in await store.reclaim() if each.alone]
    assert second.batch_id == sound
    assert await checked_but_for_blobs(store) == []


async def checked_but_for_blobs(store: Store) -> list[dict[str, object]]:
    return [each for each in await checked(store) if "blobs/" not in str(each["what"])]


async def test_a_line_that_is_given_up_waits_for_its_input(store: Store) -> None:
    lost, sound = await store.batch(1), await store.batch(1)
    for batch_id in (lost, sound):
        _, token = await opened(store, batch_id, 1)
        for _ in range(store.context.settings.max_attempts + 1):
            await store.died({token: [(0, 1)]}, complete=True)
            again = [each for each in await store.reclaim() if each.batch_id == batch_id]
            if again:
                token = (await store.open(again[0])).token
    name, content = await input_taken(store, lost)
    await store.turn()
    assert (await store.get(sound)).status == COMPLETED
    assert name in (await store.get(lost)).nightshift.reason
    await put_back(store, name, content)
    store.clock.advance(5)
    await store.turn()
    assert (await store.get(lost)).status == COMPLETED


# --- the input of a batch that is judged ----------------------------------------------------------


async def test_an_input_that_is_there_again_is_judged(store: Store) -> None:
    file = await store.upload(chat_line("r0") * 2)
    (row,) = await store.sql(sa.select(files).where(files.c.id == file.id))
    ((name, _),) = row.parts
    content = await taken(store, name)
    batch = await store.create(file.id)
    await store.turn()
    waiting = await store.get(batch.id)
    assert waiting.status == VALIDATING
    assert file.id in waiting.nightshift.reason
    await put_back(store, name, content)
    store.clock.advance(5)
    await store.turn()
    failed = await store.get(batch.id)
    assert [error.code for error in failed.errors] == ["duplicate_custom_id"]
    assert failed.nightshift.reason == ""


async def test_an_input_that_is_missing_twice_fails_its_batch(store: Store) -> None:
    file = await store.upload(chat_line("r0") * 2)
    (row,) = await store.sql(sa.select(files).where(files.c.id == file.id))
    await taken(store, row.parts[0][0])
    batch = await store.create(file.id)
    for _ in range(2):
        await store.turn()
        store.clock.advance(5)
    failed = await store.get(batch.id)
    assert failed.status == FAILED
    ((error),) = failed.errors
    assert (error.code, error.param) == ("input_lost", "file_id")
    assert file.id in error.message
    assert failed.nightshift.reason == ""


# --- results ------------------------------------------------------------------------------------


async def with_lost_results(store: Store, lines: int = 4) -> tuple[str, str, bytes]:
    """A batch of which all is done, and the results of lines 1 and 2 (a failure) are gone."""
    batch_id = await store.batch(lines)
    _, token = await opened(store, batch_id, lines)
    await store.finish(token, [1, 2], batch_id, answer="x" * INLINE_BYTES, failed=[2])
    rest = [line for line in range(lines) if line not in (1, 2)]
    await store.finish(token, rest, batch_id, failed=[0])
    query = sa.select(segments.c.blob).where(
        segments.c.batch_id == batch_id, segments.c.blob.is_not(None)
    )
    ((name,),) = await store.sql(query)
    return batch_id, name, await taken(store, name)


@pytest.mark.parametrize("end", [CANCELLED, COMPLETED])
@pytest.mark.parametrize("cut_short", [False, True])
async def test_results_that_are_lost_end_as_errors(store: Store, end: int, cut_short: bool) -> None:
    batch_id, name, content = await with_lost_results(store)
    if cut_short:
        await put_back(store, name, content[:-1])
    await store.turn()
    batch = await store.get(batch_id)
    assert batch.status == FINALIZING
    assert name in batch.nightshift.reason
    if end == CANCELLED:
        await store.cancel(batch_id)
    else:
        # Its time is over: nobody waits longer.
        store.clock.advance(DAY)
    await store.turn()
    batch = await store.get(batch_id)
    assert (batch.status, batch.nightshift.reason) == (end, "")
    assert [error.code for error in batch.errors] == ["results_lost"]
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 1, 3)
    output, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in output] == ["r3"]
    assert [line["custom_id"] for line in error] == ["r0", "r1", "r2"]
    codes = [(line["error"] or {}).get("code") for line in error]
    assert codes == [None, "result_lost", "result_lost"]
    await store.turn()
    await store.sweeper.run_once()
    assert await checked(store) == []


async def test_results_and_input_may_be_lost_together(store: Store) -> None:
    batch_id, _, _ = await with_lost_results(store)
    await input_taken(store, batch_id)
    await store.cancel(batch_id)
    await store.turn()
    batch = await store.get(batch_id)
    assert [error.code for error in batch.errors] == ["input_lost", "results_lost"]
    _, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in error] == ["r0", None, None]


async def test_what_is_only_away_is_not_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id, name, content = await with_lost_results(store)

    async def back(_seconds: float) -> None:
        await put_back(store, name, content)

    with monkeypatch.context() as patched:
        patched.setattr(salvage.asyncio, "sleep", back)
        await store.cancel(batch_id)
        await store.turn()
    assert (await store.get(batch_id)).status == CANCELLING
    store.clock.advance(5)
    await store.turn()
    batch = await store.get(batch_id)
    assert batch.status == CANCELLED
    assert not batch.errors
    assert batch.request_counts.completed == 2


async def test_a_directory_that_is_away_loses_nothing(store: Store, tmp_path: Path) -> None:
    batch_id = await store.batch(2)
    place = store.context.settings.data_dir / "blobs"
    away = place.rename(tmp_path / "away")
    place.mkdir()
    await store.cancel(batch_id)
    await store.turn()
    batch = await store.get(batch_id)
    assert batch.status == CANCELLING
    assert "right now" in batch.nightshift.reason
    place.rmdir()
    away.rename(place)
    store.clock.advance(5)
    await store.turn()
    assert [line["custom_id"] for line in (await store.end_files(batch_id))[1]] == ["r0", "r1"]


async def test_a_stream_over_lost_results_ends_with_the_reason(store: Store) -> None:
    batch_id, name, content = await with_lost_results(store)
    with pytest.raises(LostError) as told:
        await told_lines(store, batch_id)
    assert told.value.code == "results_lost"
    await put_back(store, name, content)
    await store.turn()
    assert len(await told_lines(store, batch_id)) == 4


# --- files that are asked for -----------------------------------------------------------------


async def test_a_lost_file_is_not_there_for_who_asks(store: Store) -> None:
    file = await store.upload(chat_line("r0"))
    (row,) = await store.sql(sa.select(files).where(files.c.id == file.id))
    await taken(store, row.parts[0][0])
    with pytest.raises(LostError) as told:
        await store.download(file.id)
    assert told.value.code == "content_lost"
    assert file.id in told.value.message
    # Swept while it was read, it is gone as any deleted file.
    await store.context.db.write(
        "test.step", lambda connection: connection.execute(blobs.update().values(state="doomed"))
    )
    with pytest.raises(NotFoundError):
        await store.download(file.id)


async def test_an_upload_whose_part_is_lost_says_so(store: Store) -> None:
    upload = await uploads.create(store, len(chat_line("r0")))
    part = await uploads.add(store, upload.id, chat_line("r0"))
    for (name,) in await store.sql(sa.select(blobs.c.name)):
        await taken(store, name)
    with pytest.raises(LostError, match="begin another"):
        await uploads.complete(store, upload.id, [part])
    await uploads.cancel(store, upload.id)
