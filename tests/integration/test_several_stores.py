"""Two gateways on two stores: any request to any gateway, whichever store is killed or frozen."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.kit.batches import Json, Watch, chats, check_answers, ids, jsonl, outcome, submit, upload
from tests.kit.eventually import eventually
from tests.kit.nats_server import NatsServer
from tests.kit.service_processes import Gateway, Services, services
from tests.kit.started_lines import executions, read_started, started_to

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

FAILOVER_SECONDS = 1.0
LOAD_SECONDS = 3.0
"""What a busy machine may take on top."""


@pytest.fixture
async def fleet(
    nats_server: NatsServer, postgres_url: str, tmp_path: Path
) -> AsyncIterator[Services]:
    (tmp_path / "blobs").mkdir()
    async with services(tmp_path / "fleet", nats_server.url, started_to(tmp_path / "seats")) as one:
        for _ in range(2):
            one.store(DATABASE_URL=postgres_url, BLOBS_URL=f"file://{tmp_path / 'blobs'}")
        one.scheduler("scheduler")
        for number in range(2):
            one.executor(f"executor-{number}")
        yield one


def client_of(gateway: Gateway) -> AsyncOpenAI:
    """Return the official client as it comes."""
    return AsyncOpenAI(base_url=gateway.base_url, api_key="x")


class Smaller:
    """Small batches beside the long one, and what a client does for one."""

    def __init__(self, clients: list[AsyncOpenAI]) -> None:
        self._clients = clients
        self.begun: list[tuple[Watch, list[Json]]] = []

    async def one_more(self, text: str) -> None:
        """What one gateway is told, the other one knows."""
        one, other = self._clients
        began = time.monotonic()
        for client in self._clients:
            await client.files.list()
        assert time.monotonic() - began < 2 * FAILOVER_SECONDS + LOAD_SECONDS
        lines = chats(5, text)
        file_id = await upload(one, lines)
        assert (await other.files.content(file_id)).content == jsonl(lines)
        batch = await submit(other, lines)
        assert (await one.batches.retrieve(batch.id)).id == batch.id
        self.begun.append((Watch(one, batch), lines))


async def test_a_store_that_is_killed_or_frozen_is_missed_by_nobody(
    fleet: Services, tmp_path: Path
) -> None:
    gateways = [fleet.gateway(f"gateway-{number}") for number in range(2)]
    await fleet.start()
    clients = [client_of(gateway) for gateway in gateways]
    small = Smaller(clients)
    await small.one_more("both")
    lines = chats(6_000, "long", x_simulate={"delay_ms": 400})
    watch = Watch(clients[0], await submit(clients[1], lines))
    small.begun.append((watch, lines))
    await watch.half_way()

    first, second = fleet.stores
    await first.kill()
    await small.one_more("second alone")
    first.start()
    await first.ready()

    second.send(signal.SIGSTOP)
    at = time.monotonic()
    try:
        await small.one_more("first alone")
        await eventually(lambda: time.monotonic() > at + 5)
    finally:
        second.send(signal.SIGCONT)
    await small.one_more("both again")

    done = watch.done
    await watch.until(lambda: watch.done > done, 20)
    for each, its_lines in small.begun:
        found = await outcome(clients[1], await each.end(90), ids(its_lines))
        check_answers(found, its_lines)
        assert found.counts == (len(its_lines), len(its_lines), 0)
    # No executor was hit: what they hold is recorded by whichever store is there.
    begun = executions(read_started(tmp_path / "seats"))
    assert max(begun.values()) == 1
    await asyncio.gather(*(client.close() for client in clients))
