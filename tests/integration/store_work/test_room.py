"""Quotas and the reserve: what would take too much room is refused, what runs goes on."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import admin_pb2, batches_pb2, files_pb2
from services.kit.wire.errors import InvalidRequestError, NotFoundError, UnavailableError
from services.store.admin import usage_repo
from services.store.blobs.disk_space import Disk
from tests.integration.store_work.harness import Store, running
from tests.integration.store_work.worker import frame
from tests.kit.eventually import eventually
from tests.kit.store import chat_line, our_errors, refused
from tests.kit.streams import told
from tests.kit.uploads import add, cancel, complete, create

pytestmark = pytest.mark.integration

LINE = chat_line("r0")
QUOTA = 10_000
COMPLETED = batches_pb2.BATCH_STATUS_COMPLETED


@pytest.fixture
async def limited(tmp_path: Path) -> AsyncIterator[Store]:
    """Run a store whose projects may have 10,000 bytes each."""
    async with running(tmp_path / "data", project_quota_bytes=QUOTA) as store:
        yield store


async def projects(store: Store) -> dict[str, admin_pb2.Project]:
    answer = await store.admin.ListProjects(
        admin_pb2.ListProjectsRequest(), metadata=store.metadata
    )
    return {each.id: each for each in answer.projects}


async def set_quota(store: Store, project_id: str, quota_bytes: int | None) -> admin_pb2.Project:
    with our_errors():
        answer = await store.admin.SetProjectQuota(
            admin_pb2.SetProjectQuotaRequest(project_id=project_id, quota_bytes=quota_bytes),
            metadata=store.metadata,
        )
    return answer.project


async def delete(store: Store, file_id: str) -> None:
    await store.files.DeleteFile(
        files_pb2.DeleteFileRequest(file_id=file_id), metadata=store.metadata
    )


async def test_a_file_too_many_is_refused_until_another_is_deleted(limited: Store) -> None:
    kept = await limited.upload(b"x" * 6_000, purpose="user_data")
    with pytest.raises(InvalidRequestError) as error:
        await limited.upload(b"x" * 4_001, purpose="user_data")
    assert refused(error) == (400, "storage_quota_exceeded", "file")
    for said in ("'default'", "quota of 10000 bytes", "have 6000", "4001", "Delete files"):
        assert said in error.value.message
    # Exactly what fits does.
    await limited.upload(b"x" * 4_000, purpose="user_data")
    with pytest.raises(InvalidRequestError):
        await limited.upload(b"x", purpose="user_data")
    # At once, though nothing was swept.
    await delete(limited, kept.id)
    await limited.upload(b"x" * 6_000, purpose="user_data")
    assert (await projects(limited))["default"].used_bytes == QUOTA


async def test_what_is_declared_too_large_is_refused_before_it_is_sent(limited: Store) -> None:
    sent = 0

    async def frames() -> AsyncIterator[files_pb2.UploadFileRequest]:
        nonlocal sent
        header = files_pb2.UploadFileHeader(filename="f", declared_bytes=QUOTA + 1)
        yield files_pb2.UploadFileRequest(header=header)
        # A client that waits for the answer before it sends more.
        await asyncio.Event().wait()
        sent += 1

    with pytest.raises(InvalidRequestError) as error, our_errors():
        await told(limited.files.UploadFile(frames(), metadata=limited.metadata))
    assert refused(error) == (400, "storage_quota_exceeded", "file")
    assert sent == 0
    with pytest.raises(InvalidRequestError) as error:
        await create(limited, QUOTA + 1)
    assert refused(error) == (400, "storage_quota_exceeded", "bytes")


async def test_two_that_fit_alone_do_not_both(limited: Store) -> None:
    done = await asyncio.gather(
        *(limited.upload(b"x" * 6_000, purpose="user_data") for _ in range(4)),
        return_exceptions=True,
    )
    assert sum(isinstance(each, files_pb2.File) for each in done) == 1
    assert (await projects(limited))["default"].used_bytes == 6_000


async def test_two_parts_that_fit_alone_do_not_both(limited: Store) -> None:
    upload = await create(limited, 9_000, purpose="user_data")
    done = await asyncio.gather(
        *(add(limited, upload.id, letter * 4_500) for letter in (b"x", b"y")),
        *(add(limited, upload.id, b"z" * 4_500) for _ in range(3)),
        return_exceptions=True,
    )
    assert sum(isinstance(each, str) for each in done) == 2
    assert (await projects(limited))["default"].used_bytes == 9_000


async def test_parts_count_until_their_upload_ends(limited: Store) -> None:
    upload = await create(limited, 9_000, purpose="user_data")
    other = await create(limited, 9_000, purpose="user_data")
    first = await add(limited, upload.id, b"x" * 6_000)
    with pytest.raises(InvalidRequestError) as error:
        await add(limited, other.id, b"y" * 4_001)
    assert refused(error) == (400, "storage_quota_exceeded", "data")
    second = await add(limited, upload.id, b"z" * 3_000)
    await complete(limited, upload.id, [first, second])
    # The same bytes, counted once.
    assert (await projects(limited))["default"].used_bytes == 9_000
    await add(limited, other.id, b"y" * 1_000)
    await cancel(limited, other.id)
    assert (await projects(limited))["default"].used_bytes == 9_000


async def test_end_files_are_never_refused(limited: Store) -> None:
    batch_id = await limited.batch(3)
    await limited.upload(b"x" * 9_000, purpose="user_data")
    (dispatch,) = await limited.cut((batch_id, 3))
    token = (await limited.open(dispatch)).token
    long = frame(token, batch_id, [0, 1, 2], answer="a" * 5_000)
    (answer,) = await limited.append(long)
    assert answer.accepted == 3
    await limited.turn()
    assert (await limited.get(batch_id)).status == COMPLETED
    output, _ = await limited.end_files(batch_id)
    assert len(output) == 3
    assert (await projects(limited))["default"].used_bytes > QUOTA
    with pytest.raises(InvalidRequestError):
        await limited.upload(LINE)


async def test_a_project_has_a_quota_of_its_own_where_one_is_set(limited: Store) -> None:
    own = await set_quota(limited, "default", 5_000)
    assert (own.quota_bytes, own.limit_bytes) == (5_000, 5_000)
    with pytest.raises(InvalidRequestError, match="5000"):
        await limited.upload(b"x" * 5_001, purpose="user_data")
    free = await set_quota(limited, "default", 0)
    assert free.HasField("quota_bytes")
    assert not free.HasField("limit_bytes")
    await limited.upload(b"x" * (QUOTA + 1), purpose="user_data")
    again = await set_quota(limited, "default", None)
    assert (again.HasField("quota_bytes"), again.limit_bytes) == (False, QUOTA)
    with pytest.raises(NotFoundError):
        await set_quota(limited, "nobody", 1)
    with pytest.raises(InvalidRequestError):
        await set_quota(limited, "default", -1)


async def test_too_much_is_refused_while_it_comes(limited: Store) -> None:
    async def frames() -> AsyncIterator[files_pb2.UploadFileRequest]:
        yield files_pb2.UploadFileRequest(header=files_pb2.UploadFileHeader(filename="f"))
        yield files_pb2.UploadFileRequest(data=b"x" * (QUOTA + 1))
        # It is not waited for how much more there is.
        await asyncio.Event().wait()

    with pytest.raises(InvalidRequestError) as error, our_errors():
        await told(limited.files.UploadFile(frames(), metadata=limited.metadata))
    assert refused(error) == (400, "storage_quota_exceeded", "file")


async def test_without_a_quota_there_is_none(store: Store) -> None:
    await store.upload(b"x" * (QUOTA + 1), purpose="user_data")
    (only,) = (await projects(store)).values()
    assert (only.used_bytes, only.HasField("limit_bytes")) == (QUOTA + 1, False)


# --- the reserve ----------------------------------------------------------------------------------


class Reserve:
    """A disk below its reserve while `full`; only the reading of its room is made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.looks = 0
        monkeypatch.setattr(Disk, "_is_room", self._is_room)
        monkeypatch.setattr("services.store.blobs.disk_space._LOOK_SECONDS", 0.0)

    def _is_room(self) -> bool:
        self.looks += 1
        return not self.full


@pytest.fixture
def reserve(monkeypatch: pytest.MonkeyPatch) -> Reserve:
    return Reserve(monkeypatch)


async def test_below_the_reserve_nothing_new_is_taken_and_what_runs_ends(
    store: Store, reserve: Reserve
) -> None:
    batch_id = await store.batch(4)
    file = await store.upload(LINE)
    upload = await create(store, len(LINE))
    part = await add(store, upload.id, LINE)
    pending = await create(store, len(LINE))
    (dispatch,) = await store.cut((batch_id, 4))
    reserve.full = True
    for refusing in (
        store.upload(LINE),
        create(store, len(LINE)),
        add(store, pending.id, LINE),
        store.create(file.id),
    ):
        with pytest.raises(UnavailableError, match="no new files, parts and batches") as error:
            await refusing
        assert refused(error) == (503, None, None)
        assert error.value.retry_after_seconds == 30

    await complete(store, upload.id, [part])
    token = (await store.open(dispatch)).token
    assert await store.finish(token, range(4), batch_id, answer="x" * 100_000) == 4
    await store.turn()
    assert (await store.get(batch_id)).status == COMPLETED
    output, _ = await store.end_files(batch_id)
    assert len(output) == 4
    await delete(store, file.id)
    reserve.full = False
    await store.create((await store.upload(LINE)).id)


async def test_an_upload_under_way_is_refused_once_the_reserve_is_touched(
    store: Store, reserve: Reserve
) -> None:
    async def frames() -> AsyncIterator[files_pb2.UploadFileRequest]:
        yield files_pb2.UploadFileRequest(header=files_pb2.UploadFileHeader(filename="f"))
        yield files_pb2.UploadFileRequest(data=LINE)
        reserve.full = True
        yield files_pb2.UploadFileRequest(data=LINE)
        await asyncio.Event().wait()

    with pytest.raises(UnavailableError), our_errors():
        await told(store.files.UploadFile(frames(), metadata=store.metadata))
    await store.sweeper.run_once()
    assert [each for each in (store.store.data / "blobs").rglob("*") if each.is_file()] == []


async def test_room_is_looked_at_once_a_second(tmp_path: Path) -> None:
    now = 0.0
    disk = Disk([tmp_path], 1 << 62, monotonic=lambda: now)
    with pytest.raises(UnavailableError):
        await disk.require_room()
    disk._reserve = 1
    now = 0.9
    with pytest.raises(UnavailableError):
        await disk.require_room()
    now = 1.0
    await disk.require_room()
    with pytest.raises(UnavailableError):
        await Disk([tmp_path / "gone"], 1).require_room()
    await Disk([tmp_path / "gone"], 0).require_room()


async def test_sums_over_all_batches_leave_readers_for_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the longer the more batches there ever were, and anybody may ask for them."""
    batch_id = await store.batch(1)
    go_on, begun = threading.Event(), threading.Event()
    by_key = usage_repo.by_key

    def slowly(connection: sa.Connection, project_id: str) -> list[batches_pb2.KeyUsage]:
        begun.set()
        go_on.wait(60)
        return by_key(connection, project_id)

    monkeypatch.setattr(usage_repo, "by_key", slowly)
    calls = [
        store.batches.GetUsage(batches_pb2.GetUsageRequest(), metadata=store.metadata, timeout=60)
        for _ in range(8)
    ]
    try:
        await eventually(begun.is_set)
        assert (await store.get(batch_id)).id == batch_id
    finally:
        go_on.set()
    for call in calls:
        assert len((await call).by_key) == 1
