"""Results and files that are gone: how a batch ends without them, and what is told of them."""

import asyncio
import hashlib
from pathlib import Path

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2
from services.kit.wire.errors import LostError, NotFoundError, UnavailableError
from services.store.tables.core import blobs, files, segments
from services.store.tables.uploads import upload_parts
from services.store.work.results_repo import INLINE_BYTES
from tests.integration.store_work.harness import Store
from tests.integration.store_work.losing import (
    checked,
    input_taken,
    opened,
    put_back,
    soon,
    taken,
    told_lines,
)
from tests.integration.store_work.worker import frame, in_pieces
from tests.kit import uploads
from tests.kit.store import chat_line

__all__ = ["soon"]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

WORDS = chat_line("r0") + chat_line("r1")
URL = b"/v1/chat/completions"
# More names than a part's index holds, so that the content itself is indexed.
MANY_NAMES = b"".join(chat_line(f"r{n}").replace(URL, b"%0500d" % n) for n in range(2200))
CANCELLING = batches_pb2.BATCH_STATUS_CANCELLING
CANCELLED = batches_pb2.BATCH_STATUS_CANCELLED
COMPLETED = batches_pb2.BATCH_STATUS_COMPLETED
FINALIZING = batches_pb2.BATCH_STATUS_FINALIZING
DAY = 86_400
MIB = 1024 * 1024


# --- results ------------------------------------------------------------------------------------


async def with_lost_results(
    store: Store, lines: int = 4, *, window_seconds: int = DAY
) -> tuple[str, str, bytes]:
    """A batch of which all is done, and the results of lines 1 and 2 (a failure) are gone."""
    batch_id = await store.batch(lines, window_seconds=window_seconds)
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


@pytest.mark.parametrize("end", [CANCELLED, COMPLETED])
@pytest.mark.parametrize("long", [False, True])
async def test_what_has_the_size_of_results_and_is_something_else_is_not_given_out(
    store: Store, end: int, long: bool
) -> None:
    """Content has no checksums, but every line of ours begins and ends as such."""
    batch_id = await store.batch(2)
    _, token = await opened(store, batch_id, 2)
    if long:
        await finish_long(store, token, batch_id)
    else:
        await store.finish(token, [0], batch_id, answer="x" * INLINE_BYTES)
    await store.finish(token, [1], batch_id)
    query = sa.select(segments.c.blob).where(segments.c.blob.is_not(None))
    ((name,),) = await store.sql(query)
    content = await taken(store, name)
    # As a disk gives that lost the block which the line ends in.
    await put_back(store, name, content[:-4096] + bytes(4096))
    with pytest.raises(LostError) as told:
        await told_lines(store, batch_id)
    assert told.value.code == "results_lost"
    await store.turn()
    batch = await store.get(batch_id)
    assert batch.status == FINALIZING
    assert name in batch.nightshift.reason
    assert [each["blob"] for each in await checked(store)] == [""]
    if end == COMPLETED:
        await taken(store, name)
        await put_back(store, name, content)
        store.clock.advance(5)
    else:
        await store.cancel(batch_id)
    await store.turn()
    batch = await store.get(batch_id)
    assert batch.status == end
    output, error = await store.end_files(batch_id)
    there = ["r0", "r1"] if end == COMPLETED else ["r1"]
    assert [line["custom_id"] for line in output] == there
    assert [line["custom_id"] for line in output + error if line["error"]] == (
        [] if end == COMPLETED else ["r0"]
    )
    assert [each.code for each in batch.errors] == ([] if end == COMPLETED else ["results_lost"])


async def finish_long(store: Store, token: str, batch_id: str) -> None:
    """Send a result of line 0 that is longer than what is kept of a segment, in pieces."""
    whole = frame(token, batch_id, [0], answer="x" * (5 * MIB))
    await store.append(*in_pieces(whole))


async def test_a_batch_that_waits_for_its_results_ends_on_time(store: Store) -> None:
    batch_id, _, _ = await with_lost_results(store, window_seconds=100)
    for seconds in (5, 10, 20, 40, 24):
        await store.turn()
        assert (await store.get(batch_id)).status == FINALIZING
        store.clock.advance(seconds)
    store.clock.advance(1)
    await store.turn()
    assert (await store.get(batch_id)).status == COMPLETED


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
        patched.setattr(asyncio, "sleep", back)
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
    with pytest.raises(UnavailableError):
        await store.download((await store.get(batch_id)).input_file_id)
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


@pytest.mark.parametrize("md5", [None, hashlib.md5(WORDS).hexdigest()], ids=["names", "md5"])
async def test_an_upload_whose_part_was_cut_short_says_so(store: Store, md5: str | None) -> None:
    """Nor is it said that the digest is wrong, or that there are fewer requests."""
    content = WORDS if md5 else MANY_NAMES
    upload = await uploads.create(store, len(content))
    part = await uploads.add(store, upload.id, content)
    (row,) = await store.sql(sa.select(upload_parts.c.blob))
    await put_back(store, row.blob, (await taken(store, row.blob))[:-1])
    with pytest.raises(LostError, match="begin another"):
        await uploads.complete(store, upload.id, [part], md5)
