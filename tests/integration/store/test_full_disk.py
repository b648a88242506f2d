"""A disk that is really full: nothing half-named, a clear answer, and it goes on by itself."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from protos.nightshift.v1 import batches_pb2, work_pb2
from services.kit.wire.errors import UnavailableError
from services.kit.wire.ids import uuid7_hex
from services.store.blobs.local import LocalBlobs
from tests.integration.store_work.worker import Worker, frame
from tests.kit.eventually import eventually
from tests.kit.small_disk import MIB, SmallDisk, small_disk
from tests.kit.store import StoreProcess, chat_line, refused

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]

FINALIZING = batches_pb2.BATCH_STATUS_FINALIZING
COMPLETED = batches_pb2.BATCH_STATUS_COMPLETED
ANSWER = "x" * 900_000
DISK = 48 * MIB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", DISK) as mounted:
        yield mounted


async def working(disk: SmallDisk, **environment: str) -> AsyncIterator[Worker]:
    store = StoreProcess(disk.data, {"NIGHTSHIFT_STORE_DISK_RESERVE_BYTES": "0", **environment})
    store.start()
    worker = Worker(store)
    try:
        await worker.ready()
        await worker.register()
        yield worker
    finally:
        await worker.channel.close()
        store.stop()


@pytest.fixture
async def store(disk: SmallDisk) -> AsyncIterator[Worker]:
    async for worker in working(disk):
        yield worker


def blobs(store: Worker) -> set[str]:
    return {str(path) for path in store.store.blobs()}


async def test_an_upload_on_a_full_disk(store: Worker, disk: SmallDisk) -> None:
    kept = await store.upload(chat_line("r0"))
    before = blobs(store)
    disk.fill(but=2 * MIB)
    for _ in range(3):
        with pytest.raises(UnavailableError, match="disk is full") as error:
            await store.upload(b"x" * 8 * MIB, purpose="user_data")
        assert refused(error) == (503, None, None)
        assert error.value.retry_after_seconds == 30
        await eventually(lambda: blobs(store) == before)
    assert await store.download(kept.id) == chat_line("r0")
    disk.free()
    content = b"x" * 8 * MIB
    file = await store.upload(content, purpose="user_data")
    assert await store.download(file.id) == content


async def test_a_disk_that_only_reads(disk: SmallDisk) -> None:
    blobs = LocalBlobs(disk.data)
    kept, lost = f"default/file/{uuid7_hex()}", f"default/file/{uuid7_hex()}"
    await blobs.put("test.step", kept, b"kept")
    disk.read_only(True)
    for refused_call in (
        blobs.put("test.step", lost, b"lost"),
        blobs.put("test.step", lost, _pieces()),
        blobs.delete("test.step", kept),
    ):
        with pytest.raises(UnavailableError, match="does not work right now") as error:
            await refused_call
        assert error.value.retry_after_seconds == 5
    assert await blobs.read(kept, 0, 10) == b"kept"
    disk.read_only(False)
    assert [path.name for path in disk.data.rglob("*") if path.is_file()] == [kept[-32:]]
    await blobs.put("test.step", lost, b"found")
    await blobs.delete("test.step", kept)


async def _pieces() -> AsyncIterator[bytes]:
    yield b"lost"


async def append(store: Worker, sent: work_pb2.AppendResultsRequest) -> int:
    (answer,) = await store.append(sent)
    return answer.accepted


async def test_results_and_end_files_on_a_full_disk(store: Worker, disk: SmallDisk) -> None:
    batch_id = await store.batch(13)
    (dispatch,) = await store.cut((batch_id, 13))
    token = (await store.open(dispatch)).token
    for line in range(11):
        assert await append(store, frame(token, batch_id, [line], answer=ANSWER)) == 1

    # At the commit of a result: as if it had never been sent.
    disk.fill()
    with pytest.raises(UnavailableError):
        await append(store, frame(token, batch_id, [11], answer=ANSWER))
    assert (await store.get(batch_id)).request_counts.completed == 11
    disk.free()
    last_but_one = frame(token, batch_id, [11], answer=ANSWER)
    assert await append(store, last_but_one) == 1
    assert await append(store, last_but_one) == 0

    # At the end files: they need 11 MiB, 4 are there. What fails leaves none of its parts.
    disk.fill(but=4 * MIB)
    assert await append(store, frame(token, batch_id, [12])) == 1

    async def why() -> str:
        batch = await store.get(batch_id)
        assert batch.status == FINALIZING
        return batch.nightshift.reason

    assert "disk is full" in await eventually(why)
    used = disk.used()
    log = store.store.data / "store.log"

    def failures() -> int:
        return log.read_text().count("finalize_failed")

    seen = failures()
    await eventually(lambda: failures() > seen, within_seconds=30)
    assert disk.used() < used + MIB
    disk.free()
    batch = await store.settled(batch_id, COMPLETED)
    assert batch.request_counts.completed == 13
    assert batch.nightshift.reason == ""
    output, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in output] == [f"r{line}" for line in range(13)]
    assert error == []


async def test_what_the_database_acknowledged_on_a_full_disk_stays(
    store: Worker, disk: SmallDisk
) -> None:
    file = await store.upload(chat_line("r0"))
    disk.fill()
    acknowledged: list[str] = []
    refusals: list[UnavailableError] = []
    while len(refusals) < 2:
        try:
            acknowledged.append((await store.create(file.id)).id)
        except UnavailableError as error:
            refusals.append(error)
    assert all(error.retry_after_seconds for error in refusals)
    # A start on the full disk waits for room, too, rather than giving up.
    await store.channel.close()
    store.store.kill()
    store.store.start()
    again = Worker(store.store)
    try:

        async def looked() -> bool:
            with contextlib.suppress(UnavailableError):
                await again.download(file.id)
            assert store.store.process is not None
            return store.store.process.poll() is None

        assert await looked()
        disk.free()

        async def taken() -> str | None:
            try:
                return (await again.create(file.id)).id
            except UnavailableError:
                return None

        acknowledged.append(str(await eventually(taken, within_seconds=30)))
        for batch_id in acknowledged:
            assert (await again.get(batch_id)).id == batch_id
    finally:
        await again.channel.close()


async def test_below_the_reserve_of_a_real_disk(disk: SmallDisk) -> None:
    async for store in working(disk, NIGHTSHIFT_STORE_DISK_RESERVE_BYTES=str(16 * MIB)):
        await _reserve(store, disk)


async def _reserve(store: Worker, disk: SmallDisk) -> None:
    file = await store.upload(chat_line("r0"))
    said: list[str] = []

    async def refusing() -> bool:
        try:
            await store.create(file.id)
        except UnavailableError as error:
            said.append(error.message)
            return True
        return False

    async def taken() -> bool:
        return not await refusing()

    disk.fill(but=12 * MIB)
    # It looks once a second.
    await eventually(refusing)
    assert "16777216 bytes" in said[0]
    with pytest.raises(UnavailableError, match="takes no new files"):
        await store.upload(chat_line("r1"))
    disk.free()
    await eventually(taken)
    await store.upload(chat_line("r2"))
