"""What nothing names any more leaves the directory: looked at from outside, by listing it."""

from pathlib import Path

import pytest

from protos.nightshift.v1 import files_pb2
from services.kit.errors import NotFoundError
from services.store import holds_repo
from tests.integration.store_work.harness import Store
from tests.kit.store import chat_line

pytestmark = pytest.mark.integration

HOUR = files_pb2.ExpiresAfter(anchor="created_at", seconds=3600)


def lying(store: Store) -> set[str]:
    """Return the names of all blobs in the directory."""
    root: Path = store.store.data / "blobs"
    return {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}


async def hold(store: Store, hold_id: str, until_ms: int) -> None:
    await store.context.db.write(
        "test.step", lambda connection: holds_repo.hold(connection, hold_id, until_ms)
    )


async def test_while_a_hold_stands_no_blob_is_deleted(store: Store) -> None:
    file = await store.upload(chat_line("r0"), expires_after=HOUR)
    assert len(lying(store)) == 2
    now_ms = store.context.now_ms()
    await hold(store, "backup-1", now_ms + 2 * 3_600_000)
    await hold(store, "backup-2", now_ms + 3 * 3_600_000)
    store.clock.advance(3600)
    assert await store.sweeper.run_once() == 0
    assert len(lying(store)) == 2
    with pytest.raises(NotFoundError):
        await store.download(file.id)

    await store.context.db.write(
        "test.step", lambda connection: holds_repo.release(connection, "backup-1")
    )
    assert await store.sweeper.run_once() == 0
    # The second lapses by itself: a backup that died blocks nothing for ever.
    store.clock.advance(2 * 3600)
    assert await store.sweeper.run_once() == 2
    assert lying(store) == set()
    assert await store.sql(holds_repo.sweep_holds.select()) == []


async def test_a_hold_is_moved_by_taking_it_again(store: Store) -> None:
    await store.upload(chat_line("r0"), expires_after=HOUR)
    start_ms = store.context.now_ms()
    await hold(store, "backup-1", start_ms + 3_600_000)
    await hold(store, "backup-1", start_ms + 2 * 3_600_000)
    store.clock.advance(3600)
    assert await store.sweeper.run_once() == 0
    store.clock.advance(3600)
    assert await store.sweeper.run_once() == 2
