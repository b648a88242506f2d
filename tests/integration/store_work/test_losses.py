"""Inputs that are gone while they are needed: who waits, who is told what, how it ends."""

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, files_pb2
from services.kit.wire.errors import LostError
from services.store.tables.core import batches, blobs, files
from tests.integration.store_work.harness import Store
from tests.integration.store_work.losing import (
    checked,
    input_of,
    input_taken,
    opened,
    put_back,
    soon,
    taken,
    told_lines,
)
from tests.kit import uploads
from tests.kit.store import chat_line, our_errors

__all__ = ["soon"]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

IN_PROGRESS = batches_pb2.BATCH_STATUS_IN_PROGRESS
CANCELLED = batches_pb2.BATCH_STATUS_CANCELLED
COMPLETED = batches_pb2.BATCH_STATUS_COMPLETED
EXPIRED = batches_pb2.BATCH_STATUS_EXPIRED
FAILED = batches_pb2.BATCH_STATUS_FAILED
VALIDATING = batches_pb2.BATCH_STATUS_VALIDATING
DAY = 86_400


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


async def test_a_batch_whose_input_is_another_text_waits_and_says_why(store: Store) -> None:
    batch_id = await store.batch(4)
    _, token = await opened(store, batch_id, 4)
    name, content = await input_taken(store, batch_id)
    # As long as ever, with a line feed where none was.
    await put_back(store, name, content.replace(b",", b"\n", 1))
    with pytest.raises(LostError) as told:
        await store.lines(token, [(0, 4)])
    assert told.value.code == "input_lost"
    assert name in (await store.get(batch_id)).nightshift.reason


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


async def test_what_waits_for_its_input_ends_on_time(store: Store) -> None:
    batch_id = await store.batch(2, window_seconds=6)
    _, token = await opened(store, batch_id, 2)
    await input_taken(store, batch_id)
    store.clock.advance(4)
    with pytest.raises(LostError):
        await store.lines(token, [(0, 2)])
    store.clock.advance(2)
    await store.turn()
    # Before the input would be looked for again.
    store.clock.advance(2)
    await store.turn()
    assert (await store.get(batch_id)).status == EXPIRED


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
