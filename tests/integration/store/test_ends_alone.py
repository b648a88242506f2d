"""A store alone ends what is cancelled or late: no bus, no scheduler, and silent executors.

It is a real process under its own clock, killed once in the middle.
"""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protos.nightshift.v1 import batches_pb2, files_pb2
from services.kit.wire.errors import ConflictError
from services.store.ending.ender import STOP_MS
from tests.integration.store_work.worker import Worker
from tests.kit.ports import free_port
from tests.kit.store import StoreProcess

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]

LINES = 6
DONE = (0, 3)
WINDOW_SECONDS = 6
BUSY_MS = 2_500
"""What a machine with other things to do may add to a time that the design promises."""
CANCELLED = batches_pb2.BATCH_STATUS_CANCELLED
CANCELLING = batches_pb2.BATCH_STATUS_CANCELLING
EXPIRED = batches_pb2.BATCH_STATUS_EXPIRED


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[StoreProcess]:
    """A store whose bus never answers."""
    store = StoreProcess(
        tmp_path / "data", {"NIGHTSHIFT_NATS_URL": f"nats://127.0.0.1:{free_port()}"}
    )
    store.start()
    yield store
    store.stop()


@contextlib.asynccontextmanager
async def client_of(store: StoreProcess) -> AsyncIterator[Worker]:
    client = Worker(store)
    try:
        await client.ready()
        yield client
    finally:
        await client.channel.close()


async def half_done(client: Worker, *, window_seconds: int = 86_400) -> str:
    """Begin a batch whose executor says something once and is never heard again."""
    batch_id = await client.batch(LINES, window_seconds=window_seconds)
    (dispatch,) = await client.cut((batch_id, LINES))
    token = (await client.open(dispatch)).token
    assert await client.finish(token, DONE, batch_id) == len(DONE)
    return batch_id


def times(store: StoreProcess, batch_id: str) -> tuple[int, int, int]:
    """When it stopped, was sealed and was to end, which no door tells in milliseconds."""
    with contextlib.closing(sqlite3.connect(store.data / "nightshift.db")) as connection:
        (found,) = connection.execute(
            "SELECT stopping_ms, sealed_ms, expires_ms FROM batches WHERE id = ?", (batch_id,)
        ).fetchall()
    return found


async def check_files(client: Worker, batch_id: str, code: str) -> None:
    output, error = await client.end_files(batch_id)
    assert [line["custom_id"] for line in output] == [f"r{line}" for line in DONE]
    rest = [line for line in range(LINES) if line not in DONE]
    assert [line["custom_id"] for line in error] == [f"r{line}" for line in rest]
    assert {line["error"]["code"] for line in error} == {code}


async def test_cancels_and_deadlines_need_nobody_else(alone: StoreProcess) -> None:
    async with client_of(alone) as client, client_of(alone) as other:
        await client.register()
        late = await half_done(client, window_seconds=WINDOW_SECONDS)
        silent = await half_done(client)
        untouched = await client.batch(LINES)
        both = [client.cancel(silent), other.cancel(silent), client.cancel(untouched)]
        for answer in await asyncio.gather(*both):
            assert answer.status in (CANCELLING, CANCELLED)
        input_id = (await client.get(silent)).input_file_id
        await client.files.DeleteFile(
            files_pb2.DeleteFileRequest(file_id=input_id), metadata=client.metadata
        )

        await client.settled(silent, CANCELLED)
        await check_files(client, silent, "batch_cancelled")
        stopping_ms, sealed_ms, _ = times(alone, silent)
        assert STOP_MS <= sealed_ms - stopping_ms <= STOP_MS + BUSY_MS
        assert (await client.cancel(silent)).status == CANCELLED
        await client.settled(untouched, CANCELLED)
        stopping_ms, sealed_ms, _ = times(alone, untouched)
        # Nothing ran, so that nothing was waited for.
        assert sealed_ms - stopping_ms <= BUSY_MS

        await client.settled(late, EXPIRED)
        await check_files(client, late, "batch_expired")
        _, sealed_ms, expires_ms = times(alone, late)
        assert expires_ms <= sealed_ms <= expires_ms + STOP_MS + BUSY_MS
        with pytest.raises(ConflictError):
            await other.cancel(late)


async def test_an_acknowledged_cancel_is_carried_out_by_the_next_process(
    alone: StoreProcess,
) -> None:
    async with client_of(alone) as client:
        await client.register()
        batch_id = await half_done(client)
        late = await half_done(client, window_seconds=WINDOW_SECONDS)
        await client.cancel(batch_id)
        alone.kill()
    alone.start()
    async with client_of(alone) as client:
        back = time.monotonic()
        await client.settled(batch_id, CANCELLED)
        assert time.monotonic() - back <= 3 + BUSY_MS / 1000
        await check_files(client, batch_id, "batch_cancelled")
        await client.settled(late, EXPIRED)
        await check_files(client, late, "batch_expired")
