"""Blobs that are there and that the disk refuses to read: who waits, and is told what."""

import errno
import os

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2
from services.kit.wire.errors import LostError, UnavailableError
from services.store.tables.core import batches, files, segments
from services.store.work.results_repo import INLINE_BYTES
from tests.integration.store_work.harness import Store
from tests.integration.store_work.losing import checked, input_of, opened, refused, soon, taken
from tests.kit.store import chat_line

__all__ = ["soon"]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

IN_PROGRESS = batches_pb2.BATCH_STATUS_IN_PROGRESS
CANCELLING = batches_pb2.BATCH_STATUS_CANCELLING
CANCELLED = batches_pb2.BATCH_STATUS_CANCELLED
COMPLETED = batches_pb2.BATCH_STATUS_COMPLETED
FAILED = batches_pb2.BATCH_STATUS_FAILED
FINALIZING = batches_pb2.BATCH_STATUS_FINALIZING
VALIDATING = batches_pb2.BATCH_STATUS_VALIDATING
WHY = "Is a directory"


async def reason(store: Store, batch_id: str) -> str:
    return (await store.get(batch_id)).nightshift.reason


def is_told(said: str, name: str) -> bool:
    """Tell whether a reason is that a blob cannot be read, and not that it is lost."""
    return name in said and WHY in said and "cannot be read" in said and "missing" not in said


async def test_a_batch_whose_input_cannot_be_read_waits_and_says_why(store: Store) -> None:
    batch_id, other = await store.batch(2), await store.batch(1)
    dispatch, token = await opened(store, batch_id, 2)
    ((name, _),) = (await input_of(store, batch_id)).parts
    with refused(store, name):
        for pause in (5, 10):
            with pytest.raises(LostError):
                await store.lines(token, [(0, 2)])
            assert is_told(await reason(store, batch_id), name)
            # Others go before it meanwhile.
            await store.lead()
            assert [each.batch_id for each in (await store.window()).batches] == [other]
            assert (await store.deliver(dispatch, delivered=2)).busy.retry_after_ms == pause * 1000
            store.clock.advance(pause)
            (dispatch,) = await store.reclaim()
            token = (await store.open(dispatch)).token
        with pytest.raises(UnavailableError):
            await store.download((await store.get(batch_id)).input_file_id)
    assert len(await store.lines(token, [(0, 2)])) == 2
    assert (await store.get(batch_id)).status == IN_PROGRESS
    assert await reason(store, batch_id) == ""


async def test_a_line_index_that_cannot_be_read_is_made_again(store: Store) -> None:
    batch_id, other = await store.batch(2), await store.batch(2)
    file = await input_of(store, batch_id)
    ((name, _),) = file.parts
    with refused(store, file.index_blob):
        with refused(store, name):
            # What can be made again of nothing keeps no other batch.
            (dispatch,) = await store.cut((batch_id, 2), (other, 2))
            assert dispatch.batch_id == other
            assert is_told(await reason(store, batch_id), name)
        store.clock.advance(5)
        _, token = await opened(store, batch_id, 2)
        assert len(await store.lines(token, [(0, 2)])) == 2
    assert (await input_of(store, batch_id)).index_blob != file.index_blob
    assert await reason(store, batch_id) == ""


async def test_an_input_that_is_to_be_judged_is_waited_for_until_it_is_lost(store: Store) -> None:
    file = await store.upload(chat_line("r0") * 2)
    (row,) = await store.sql(sa.select(files.c.parts).where(files.c.id == file.id))
    ((name, _),) = row.parts
    batch_id = (await store.create(file.id)).id
    with refused(store, name):
        for _ in range(3):
            await store.turn()
            assert (await store.get(batch_id)).status == VALIDATING
            assert is_told(await reason(store, batch_id), name)
            store.clock.advance(5)
    # As an operator does with what its disk never gives back: looked for twice, it is lost.
    await taken(store, name)
    await store.turn()
    assert (await store.get(batch_id)).status == VALIDATING
    assert "missing" in await reason(store, batch_id)
    store.clock.advance(5)
    await store.turn()
    batch = await store.get(batch_id)
    assert (batch.status, [each.code for each in batch.errors]) == (FAILED, ["input_lost"])


async def done_but_for_end_files(store: Store) -> tuple[str, str]:
    """Return a batch of which all is done, and the blob with the result of its first line."""
    batch_id = await store.batch(2)
    _, token = await opened(store, batch_id, 2)
    await store.finish(token, [0], batch_id, answer="x" * INLINE_BYTES)
    await store.finish(token, [1], batch_id)
    query = sa.select(segments.c.blob).where(
        segments.c.batch_id == batch_id, segments.c.blob.is_not(None)
    )
    ((name,),) = await store.sql(query)
    return batch_id, name


async def test_results_that_cannot_be_read_keep_their_batch_from_ending(store: Store) -> None:
    batch_id, name = await done_but_for_end_files(store)
    sound, _ = await done_but_for_end_files(store)
    with refused(store, name):
        for pause in (5, 10, 20):
            await store.turn()
            assert (await store.get(batch_id)).status == FINALIZING
            assert is_told(await reason(store, batch_id), name)
            # People have to mend it, so that it is tried ever less often.
            query = sa.select(batches.c.retry_ms).where(batches.c.id == batch_id)
            ((retry_ms,),) = await store.sql(query)
            assert retry_ms - store.context.now_ms() == pause * 1000
            store.clock.advance(pause)
        assert (await store.get(sound)).status == COMPLETED
    await store.turn()
    batch = await store.get(batch_id)
    assert (batch.status, batch.nightshift.reason) == (COMPLETED, "")
    assert len((await store.end_files(batch_id))[0]) == 2


async def test_a_cancelled_batch_ends_without_what_was_moved_away(store: Store) -> None:
    batch_id, name = await done_but_for_end_files(store)
    with refused(store, name):
        await store.cancel(batch_id)
        await store.turn()
        # It may be given after all: nothing is given up for what may pass.
        assert (await store.get(batch_id)).status == CANCELLING
        assert is_told(await reason(store, batch_id), name)
    await taken(store, name)
    store.clock.advance(5)
    await store.turn()
    batch = await store.get(batch_id)
    assert (batch.status, [each.code for each in batch.errors]) == (CANCELLED, ["results_lost"])


async def test_a_line_that_is_given_up_holds_up_no_other(store: Store) -> None:
    unread, sound = await store.batch(1), await store.batch(1)
    for batch_id in (unread, sound):
        _, token = await opened(store, batch_id, 1)
        for _ in range(store.context.settings.max_attempts + 1):
            await store.died({token: [(0, 1)]}, complete=True)
            again = [each for each in await store.reclaim() if each.batch_id == batch_id]
            if again:
                token = (await store.open(again[0])).token
    ((name, _),) = (await input_of(store, unread)).parts
    with refused(store, name):
        await store.turn()
        assert (await store.get(sound)).status == COMPLETED
        assert is_told(await reason(store, unread), name)
    store.clock.advance(5)
    await store.turn()
    assert (await store.get(unread)).status == COMPLETED


async def test_the_check_names_what_cannot_be_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, _ = await done_but_for_end_files(store)
    await store.turn()
    batch_id, result = await done_but_for_end_files(store)
    assert await checked(store) == []

    def refuse(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", refuse)
    found = await checked(store)
    assert all("cannot be read: Input/output error" in str(each["what"]) for each in found)
    output = (await store.get(ended)).output_file_id
    assert {str(each["subject"]) for each in found} == {ended, output, batch_id}
    assert {result} <= {str(each["blob"]) for each in found}
