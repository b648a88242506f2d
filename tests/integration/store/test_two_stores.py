"""Two stores on one PostgreSQL: one is stopped inside a transaction, and the other one goes on."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from protos.nightshift.v1 import batches_pb2, work_pb2
from services.kit.calls import rpc
from services.kit.wire.errors import StaleTermError, UnavailableError
from tests.kit.eventually import eventually
from tests.kit.postgres import Postgres
from tests.kit.store import Client, StoreProcess, chat_line, client_of, our_errors

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(120)]

IDLE_SECONDS = 2
LINES = 10


def environment(folder: Path, url: str) -> dict[str, str]:
    """Return what stores on the same data are started with."""
    return {
        # Ours is 5 s; a test need not wait so long.
        "NIGHTSHIFT_STORE_DATABASE_URL": (
            f"{url}?options=-c%20idle_in_transaction_session_timeout%3D{IDLE_SECONDS}000"
        ),
        "NIGHTSHIFT_STORE_BLOBS_URL": (folder / "blobs").as_uri(),
    }


async def listens(store: StoreProcess) -> bool:
    """Tell whether a store takes connections."""
    try:
        _, writer = await asyncio.open_connection(*store.address.rsplit(":", 1))
    except OSError:
        return False
    writer.close()
    return True


async def listening(store: StoreProcess) -> None:
    """Wait until a store takes connections."""
    await eventually(lambda: listens(store), within_seconds=60, every_seconds=0.05)


@dataclass
class Two:
    """A store that is to stop at a place, and one that goes on."""

    first: StoreProcess
    stopping: Client
    going: Client

    async def stopped(self) -> None:
        """Wait until the first one stands still."""
        assert self.first.process is not None
        status = Path(f"/proc/{self.first.process.pid}/stat")
        await eventually(
            lambda: status.read_text().rpartition(")")[2].split()[0] == "T", within_seconds=30
        )

    def go_on(self) -> None:
        """Let the first one go on."""
        assert self.first.process is not None
        os.kill(self.first.process.pid, signal.SIGCONT)


@pytest.fixture
async def two(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_url: str
) -> AsyncIterator[Two]:
    shared = environment(tmp_path, postgres_url)
    armed = {**shared, "NIGHTSHIFT_FAILPOINTS": request.param}
    first = StoreProcess(tmp_path / "first", armed)
    second = StoreProcess(tmp_path / "second", shared)
    async with AsyncExitStack() as stack:
        # They begin on an empty database at the same time.
        for store in (first, second):
            store.start()
            stack.callback(store.kill)
        for store in (first, second):
            await listening(store)
        clients = [await stack.enter_async_context(client_of(each)) for each in (first, second)]
        yield Two(first, *clients)


async def create(client: Client, file_id: str, key: str) -> batches_pb2.Batch:
    metadata = rpc.metadata(
        (client.store.data / "secret").read_text().strip(),
        project_id=client.project_id,
        idempotency_key=key,
    )
    with our_errors():
        answer = await client.batches.CreateBatch(
            batches_pb2.CreateBatchRequest(
                input_file_id=file_id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                completion_window_seconds=86_400,
            ),
            metadata=metadata,
        )
    return answer.batch


async def batches(client: Client) -> list[str]:
    answer = await client.batches.ListBatches(
        batches_pb2.ListBatchesRequest(), metadata=client.metadata
    )
    return [batch.id for batch in answer.batches]


@pytest.mark.parametrize("two", ["batch.create:before=freeze"], indirect=True)
async def test_what_a_stopped_store_was_writing_takes_effect_once(two: Two) -> None:
    """The client gives the first store up and asks the second one under the same key."""
    file = await two.going.upload(b"".join(chat_line(f"r{n}") for n in range(LINES)))
    late = asyncio.create_task(create(two.stopping, file.id, "key"))
    await two.stopped()
    # The lock of all writers is held, until the server has had enough of who holds it.
    asked = asyncio.get_running_loop().time()
    made = await create(two.going, file.id, "key")
    assert asyncio.get_running_loop().time() - asked < IDLE_SECONDS + 4
    await two.going.settled(made.id, batches_pb2.BATCH_STATUS_IN_PROGRESS)

    two.go_on()
    assert (await late).id == made.id
    for client in (two.stopping, two.going):
        assert await batches(client) == [made.id]


@pytest.mark.parametrize("two", ["chunk.cut:before=freeze"], indirect=True)
async def test_an_old_leader_whose_store_was_stopped_does_no_harm(two: Two) -> None:
    """The old leader's cut is under way when a new leader comes, and continues after it."""

    async def lead(client: Client, holder: str) -> int:
        async def leads() -> int:
            request = work_pb2.LeadRequest(holder=holder, ttl_ms=2_000)
            try:
                with our_errors():
                    answer = await client.work.Lead(request, metadata=client.metadata)
            except UnavailableError:
                # The lock of all writers was held for longer than the call may take.
                return 0
            return answer.term if answer.leader else 0

        return await eventually(leads, within_seconds=30)

    async def cut(client: Client, term: int) -> list[int]:
        request = work_pb2.CutChunksRequest(
            term=term, cuts=[work_pb2.Cut(batch_id=batch.id, max_lines=4, max_bytes=1 << 20)]
        )
        with our_errors():
            answer = await client.work.CutChunks(request, metadata=client.metadata)
        return [each.lines[0].first for each in answer.dispatches]

    file = await two.going.upload(b"".join(chat_line(f"r{n}") for n in range(LINES)))
    batch = await create(two.going, file.id, "key")
    await two.going.settled(batch.id, batches_pb2.BATCH_STATUS_IN_PROGRESS)
    old = await lead(two.stopping, "old")
    late = asyncio.create_task(cut(two.stopping, old))
    await two.stopped()
    new = await lead(two.going, "new")
    assert new == old + 1
    assert await cut(two.going, new) == [0]

    two.go_on()
    # Where its call's time was over, the leader does not even hear it.
    with pytest.raises((StaleTermError, UnavailableError)):
        await late
    with pytest.raises(StaleTermError):
        await cut(two.stopping, old)
    new = await lead(two.going, "new")
    assert await cut(two.going, new) == [4]


async def test_a_store_waits_for_its_database_and_then_works(tmp_path: Path) -> None:
    server = Postgres()
    store = StoreProcess(tmp_path / "data", environment(tmp_path, server.url()))
    store.start()
    try:
        await eventually(
            lambda: (store.data / "store.log").exists() and "database_awaited" in store.log(),
            within_seconds=60,
        )
        assert store.process is not None
        assert store.process.poll() is None
        # Nobody takes it for ready.
        assert not await listens(store)
        await asyncio.to_thread(server.start)
        await listening(store)
        async with client_of(store) as client:
            assert await batches(client) == []
    finally:
        store.kill()
        server.remove()
