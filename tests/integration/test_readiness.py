"""A service is ready only while it can really take work: what it needs goes, and comes back."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from services.kit.calls import rpc
from tests.kit.eventually import eventually
from tests.kit.nats_server import NatsServer
from tests.kit.service_processes import Gateway, ServiceProcess, Services, services
from tests.kit.up import running_up

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

TURN_SECONDS = 15.0
FAR_TOO_MUCH = str(10**18)


class Fleet:
    """One of each service, ready."""

    def __init__(self, all_of_it: Services) -> None:
        self.all = all_of_it
        self.store = all_of_it.store()
        self.scheduler = all_of_it.scheduler("scheduler")
        self.gateway: Gateway = all_of_it.gateway("gateway")

    async def are(self, *, ready: bool, what: tuple[ServiceProcess, ...]) -> None:
        """Wait until all of these say that they are, or are not."""

        async def say_so() -> bool:
            said = [await process.is_serving() for process in what]
            if self.gateway in what:
                said.append(await self.gateway.readyz() == 200)
            return said == [ready] * len(said)

        await eventually(say_so, within_seconds=TURN_SECONDS, every_seconds=0.05)


@pytest.fixture
async def fleet(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with services(tmp_path / "fleet", nats_server.url) as all_of_it:
        fleet = Fleet(all_of_it)
        await all_of_it.start()
        yield fleet


async def test_each_is_ready_while_what_it_needs_is_there(
    fleet: Fleet, nats_server: NatsServer
) -> None:
    store, scheduler, gateway = fleet.store, fleet.scheduler, fleet.gateway
    await fleet.are(ready=True, what=(store, scheduler, gateway))

    nats_server.stop()
    await fleet.are(ready=False, what=(scheduler,))
    # Batches are taken without a broker, and begin when it is there.
    await fleet.are(ready=True, what=(store, gateway))
    nats_server.start()
    await fleet.are(ready=True, what=(scheduler,))

    await store.kill()
    await fleet.are(ready=False, what=(scheduler, gateway))
    store.start()
    await fleet.are(ready=True, what=(store, scheduler, gateway))

    data = Path(store.settings["NIGHTSHIFT_STORE_DATA_DIR"])
    # As where the disk of all blobs is not mounted.
    (data / "blobs").rename(data / "away")
    await fleet.are(ready=False, what=(store, scheduler, gateway))
    await eventually(lambda: _says(gateway, "blobs_unavailable"), within_seconds=TURN_SECONDS)
    (data / "away").rename(data / "blobs")
    await fleet.are(ready=True, what=(store, scheduler, gateway))

    database = data / "nightshift.db"
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        await fleet.are(ready=False, what=(store, scheduler, gateway))
        await eventually(
            lambda: _says(gateway, "database_unavailable"), within_seconds=TURN_SECONDS
        )
        other.execute("ROLLBACK")
    await fleet.are(ready=True, what=(store, scheduler, gateway))


async def test_a_gateway_that_stops_is_ready_no_more_and_still_answers(fleet: Fleet) -> None:
    leaving = fleet.all.gateway("leaving", DRAIN_DELAY_SECONDS="6")
    await fleet.all.start(leaving)
    async with AsyncOpenAI(base_url=leaving.base_url, api_key="x", max_retries=0) as client:
        ending = asyncio.create_task(leaving.stop())
        await eventually(lambda: _says(leaving, "stopping"))
        assert not await leaving.is_serving()
        assert (await client.models.list()).data == []
        assert await ending == 0


async def test_a_store_without_room_takes_nothing_new_and_runs_what_there_is(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with services(tmp_path / "fleet", nats_server.url) as all_of_it:
        store = all_of_it.store(DISK_RESERVE_BYTES=FAR_TOO_MUCH)
        scheduler, gateway = all_of_it.scheduler("scheduler"), all_of_it.gateway("gateway")
        for process in (store, scheduler, gateway):
            process.start()
        await scheduler.ready()
        assert not await store.is_serving()
        async with rpc.open_channel(store.address) as channel:
            assert await rpc.is_serving(channel, "nightshift.v1.Work")
        await eventually(lambda: _says(gateway, "storage_reserve"))


def test_up_begins_though_there_is_little_room(tmp_path: Path) -> None:
    # Who waited for room here would keep batches from ending, and people from making some.
    settings = {"NIGHTSHIFT_STORE_DISK_RESERVE_BYTES": FAR_TOO_MUCH}
    with running_up(tmp_path / "data", environment=settings) as up:
        assert httpx.get(f"{up.base_url}/files").json()["data"] == []
        refused = httpx.post(
            f"{up.base_url}/files", data={"purpose": "batch"}, files={"file": b"{}"}
        )
        assert refused.status_code == 503


async def _says(gateway: Gateway, code: str) -> bool:
    async with httpx.AsyncClient() as client:
        try:
            answer = await client.get(f"http://{gateway.http}/readyz")
        except httpx.TransportError:
            return False
    return answer.status_code == 503 and answer.json()["error"]["code"] == code
