"""A file past its time, under a clock that the test sets."""

import pytest

from protos.nightshift.v1 import common_pb2, files_pb2
from services.kit.wire.errors import NotFoundError
from tests.integration.store_work.harness import Store
from tests.kit.store import chat_line, our_errors, refused

HOUR = files_pb2.ExpiresAfter(anchor="created_at", seconds=3600)


async def listed(store: Store, **query: object) -> list[str]:
    """Return the ids of the files that a list shows."""
    answer = await store.files.ListFiles(
        files_pb2.ListFilesRequest(page=common_pb2.PageRequest(limit=100), **query),  # type: ignore[arg-type]
        metadata=store.metadata,
    )
    return [file.id for file in answer.files]


# contract: 18
async def test_an_expired_file_is_unknown_and_its_blobs_go(store: Store) -> None:
    kept = await store.upload(chat_line("r0"))
    file = await store.upload(chat_line("r1"), expires_after=HOUR)
    store.clock.advance(3599)
    assert await listed(store) == [file.id, kept.id]
    assert await store.download(file.id) == chat_line("r1")
    before = await store.sweeper.run_once()
    store.clock.advance(1)

    # Nothing has swept yet: the clock alone decides.
    assert await listed(store) == [kept.id]
    assert await listed(store, purpose="batch") == [kept.id]
    with pytest.raises(NotFoundError) as error, our_errors():
        await store.files.GetFile(
            files_pb2.GetFileRequest(file_id=file.id), metadata=store.metadata
        )
    assert refused(error) == (404, None, "id")
    with pytest.raises(NotFoundError):
        await store.download(file.id)
    with pytest.raises(NotFoundError), our_errors():
        await store.files.DeleteFile(
            files_pb2.DeleteFileRequest(file_id=file.id), metadata=store.metadata
        )

    # Its content and its index.
    assert (before, await store.sweeper.run_once()) == (0, 2)
    assert await store.download(kept.id) == chat_line("r0")


async def test_a_batch_runs_on_though_its_input_expires(store: Store) -> None:
    file = await store.upload(chat_line("r1"), expires_after=HOUR)
    batch = await store.create(file.id)
    await store.validated(batch.id)
    (dispatch,) = await store.cut((batch.id, 1))
    store.clock.advance(3600)
    assert await listed(store) == []
    assert await store.sweeper.run_once() == 0
    attempt = await store.open(dispatch)
    assert (await store.lines(attempt.token, [(0, 1)]))[0].rstrip(b"\n") == chat_line("r1").rstrip()
