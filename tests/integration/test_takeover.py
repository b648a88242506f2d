"""Who leads when the leader dies, stands still or leaves: real schedulers on a real store."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from services.kit.calls import rpc
from services.kit.process.clock import SystemClock
from services.scheduler.leader import TTL_SECONDS, Leader
from services.scheduler.work_client import WorkClient
from tests.kit.batches import Watch, chats, check_answers, ids, outcome, submit
from tests.kit.eventually import eventually
from tests.kit.nats_server import NatsServer
from tests.kit.ports import free_port
from tests.kit.scripted_window import SECRET, ScriptedWindow
from tests.kit.service_processes import ServiceProcess, Services, services
from tests.kit.started_lines import executions, read_started, started_to

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

TAKEOVER_SECONDS = TTL_SECONDS + 1.0
LOAD_SECONDS = 3.0
"""What a busy machine may take on top."""


class Schedulers:
    """Some of them, of which one leads, as their metrics say."""

    def __init__(self, fleet: Services, count: int) -> None:
        self._metrics = {f"scheduler-{n}": f"127.0.0.1:{free_port()}" for n in range(count)}
        self.processes = {
            name: fleet.scheduler(name, METRICS_LISTEN=listen)
            for name, listen in self._metrics.items()
        }

    async def leader(self, *, other_than: ServiceProcess | None = None) -> ServiceProcess:
        """Wait until one of them leads, which is not `other_than`; return it."""

        async def found() -> ServiceProcess | None:
            for name, process in self.processes.items():
                if process is not other_than and await self._leads(name):
                    return process
            return None

        process = await eventually(found, within_seconds=TAKEOVER_SECONDS + LOAD_SECONDS)
        assert process is not None
        return process

    async def leaders(self) -> list[str]:
        """Return the names of all that think that they lead."""
        return [name for name in self.processes if await self._leads(name)]

    async def _leads(self, name: str) -> bool:
        async with httpx.AsyncClient() as client:
            try:
                answer = await client.get(f"http://{self._metrics[name]}/metrics", timeout=0.5)
            except httpx.TransportError:
                return False
        return "nightshift_scheduler_leader 1.0" in answer.text


@pytest.fixture
async def fleet(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Services]:
    async with services(tmp_path / "fleet", nats_server.url, started_to(tmp_path / "seats")) as one:
        one.store()
        yield one


async def test_a_standby_goes_on_whatever_becomes_of_the_leader(
    fleet: Services, tmp_path: Path
) -> None:
    schedulers = Schedulers(fleet, 3)
    for number in range(2):
        fleet.executor(f"executor-{number}")
    gateway = fleet.gateway("gateway")
    await fleet.start()
    async with AsyncOpenAI(base_url=gateway.base_url, api_key="x") as client:
        lines = chats(5_000, x_simulate={"delay_ms": 350})
        watch = Watch(client, await submit(client, lines))
        await watch.half_way()

        killed = await schedulers.leader()
        await killed.kill()
        frozen = await schedulers.leader(other_than=killed)
        killed.start()
        await killed.ready()

        frozen.send(signal.SIGSTOP)
        at = time.monotonic()
        after = await schedulers.leader(other_than=frozen)
        # Longer than its lease: when it wakes, it goes on where it stood.
        await eventually(lambda: time.monotonic() > at + TAKEOVER_SECONDS, within_seconds=10)
        frozen.send(signal.SIGCONT)
        await frozen.ready()

        async def one_is_left() -> bool:
            return await schedulers.leaders() == [after.name]

        await eventually(one_is_left)

        assert await after.stop() == 0
        at = time.monotonic()
        await schedulers.leader(other_than=after)
        # It resigned: nobody had to wait for its lease.
        assert time.monotonic() - at < TTL_SECONDS
        # There is work for the last of them, too, however long all of it took.
        last = chats(500, "last")
        other = Watch(client, await submit(client, last))

        for each, its in ((watch, lines), (other, last)):
            found = await outcome(client, await each.end(60), ids(its))
            check_answers(found, its)
            assert found.counts == (len(its), len(its), 0)
        # No executor was hit, so that nothing had to be run twice.
        begun = executions(read_started(tmp_path / "seats"))
        assert len(begun) == len(lines) + len(last)
        assert max(begun.values()) == 1


async def test_an_answer_older_than_the_end_of_a_term_does_not_begin_it_again() -> None:
    work = ScriptedWindow()
    server = await work.serve()
    channel = rpc.open_channel(f"127.0.0.1:{server.port}")
    leader = Leader(WorkClient(channel, SECRET), holder="one", clock=SystemClock())
    assert await leader.run_once()
    assert leader.term == 1
    work.held["Lead"] = asyncio.Event()
    renewing = asyncio.create_task(leader.run_once())
    await eventually(lambda: work.called("Lead") == 2)
    # The store says so to a call of the dispatcher, while the answer to this one is under way.
    leader.lost(1)
    work.held.pop("Lead").set()
    assert await renewing
    assert work.called("Lead") == 3
    await channel.close()
    await server.server.stop(0)
