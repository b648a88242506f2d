"""Every service restarted, one after the other, under clients that notice nothing."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.kit.batches import Watch, chats, check_answers, ids, jsonl, outcome, submit, upload
from tests.kit.eventually import eventually
from tests.kit.load_balancer import LoadBalancer
from tests.kit.nats_server import NatsServer
from tests.kit.service_processes import Services, services
from tests.kit.started_lines import executions, read_started, started_to

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]


PACE_SECONDS = 0.2


class Clients:
    """People who use the API all the while, each with the official client as it comes."""

    def __init__(self, base_url: str) -> None:
        self.client = AsyncOpenAI(base_url=base_url, api_key="x")
        self.done = {"upload": 0, "create": 0, "list": 0, "download": 0, "large download": 0}
        self.created: list[str] = []
        self.stopping = False

    async def _repeat(self, what: str, act: Callable[[int], Awaitable[None]]) -> None:
        for number in itertools.count():
            if self.stopping:
                return
            await act(number)
            self.done[what] += 1
            # A person's pace: all of them together leave the services time to do their own work.
            await asyncio.sleep(PACE_SECONDS)

    async def _upload(self, number: int) -> None:
        lines = chats(20, f"upload {number}")
        file_id = await upload(self.client, lines)
        assert (await self.client.files.content(file_id)).content == jsonl(lines)

    async def _create(self, number: int) -> None:
        batch = await submit(self.client, chats(5, f"create {number}"))
        self.created.append(batch.id)

    async def _list(self, _: int) -> None:
        listed = [batch.id async for batch in self.client.batches.list(limit=100)]
        assert len(set(listed)) == len(listed)

    async def _download(self, _: int) -> None:
        if self.created:
            batch = await self.client.batches.retrieve(self.created[0])
            if batch.output_file_id:
                assert (await self.client.files.content(batch.output_file_id)).content

    async def _large_download(self, file_id: str, size: int) -> None:
        assert len((await self.client.files.content(file_id)).content) == size

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Have all of them at it until the block ends; what one of them meets is raised."""
        large = chats(5_000, "x" * 400)
        size = len(jsonl(large))
        file_id = await upload(self.client, large)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat("upload", self._upload))
            group.create_task(self._repeat("create", self._create))
            group.create_task(self._repeat("list", self._list))
            group.create_task(self._repeat("download", self._download))
            group.create_task(
                self._repeat("large download", lambda _: self._large_download(file_id, size))
            )
            try:
                yield
            finally:
                self.stopping = True


@pytest.fixture
async def fleet(
    nats_server: NatsServer, postgres_url: str, tmp_path: Path
) -> AsyncIterator[Services]:
    async with services(tmp_path / "fleet", nats_server.url, started_to(tmp_path / "seats")) as one:
        for _ in range(2):
            one.store(DATABASE_URL=postgres_url, BLOBS_URL=f"file://{tmp_path / 'blobs'}")
        (tmp_path / "blobs").mkdir()
        for number in range(2):
            one.scheduler(f"scheduler-{number}")
            one.executor(f"executor-{number}")
        yield one


async def test_a_rolling_restart_of_everything_is_noticed_by_nobody(
    fleet: Services, tmp_path: Path
) -> None:
    gateways = [fleet.gateway(f"gateway-{number}") for number in range(2)]
    await fleet.start()
    async with LoadBalancer([each.http for each in gateways]) as balancer:
        clients = Clients(f"http://{balancer.address}/v1")
        lines = [chats(2_000, f"batch {n}", x_simulate={"delay_ms": 400}) for n in range(3)]
        watches = [Watch(clients.client, await submit(clients.client, each)) for each in lines]
        await watches[0].half_way()
        async with clients.at_work():
            # Executors first, while there is work, and those that write newer messages after them.
            for process in sorted(fleet.processes, key=lambda each: each.name):
                before = dict(clients.done)
                if process.name.startswith("executor"):
                    await watches[-1].poll()
                    assert watches[-1].done < watches[-1].total, "too late to disturb anyone"
                await process.restart()
                await process.ready()
                # Each of them got something done meanwhile, or does now.
                await eventually(
                    lambda before=before: all(clients.done[each] > before[each] for each in before),
                    within_seconds=30,
                )
        for watch, each in zip(watches, lines, strict=True):
            found = await outcome(clients.client, await watch.end(90), ids(each))
            check_answers(found, each)
            assert found.counts == (len(each), len(each), 0)
        for batch_id in clients.created:
            batch = await clients.client.batches.retrieve(batch_id)
            await Watch(clients.client, batch).until_status("completed")
        await clients.client.close()
    # All of them had the time to finish what ran, so that nothing had to be run twice.
    begun = executions(read_started(tmp_path / "seats"))
    assert len(begun) == sum(map(len, lines)) + 5 * len(clients.created)
    assert max(begun.values()) == 1
