"""An executor that is killed, frozen, or cut off from bus, store or both, and is back later.

Where it is cut off nothing is refused: packets do not arrive, in both directions or in one. Its
lines run elsewhere in time, none is lost or stands twice, and it goes on taking work afterwards.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import pytest
from openai import AsyncOpenAI

from services.executor.chunks.keep_alive import BEAT_SECONDS
from services.executor.engines.simulated.engine import SimulatedEngine
from services.executor.engines.simulated.started_log import StartedFile
from services.executor.executor import Executor, Identity
from services.executor.store_client import StoreClient
from services.kit.calls import rpc
from services.kit.messages import bus as buses
from services.kit.messages.bus import ACK_WAIT_SECONDS
from services.kit.process.clock import SystemClock
from services.kit.wire.ids import pool_id_of
from tests.kit.batches import Watch, chats, check_answers, ids, outcome, submit
from tests.kit.eventually import eventually
from tests.kit.nats_server import NatsServer
from tests.kit.service_processes import Gateway, ServiceProcess, Services, services
from tests.kit.started_lines import Started, executions, read_started, started_to
from tests.kit.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]

LINES: Final = 12
"""Few enough for one chunk, which one executor then has."""
LINE_MS: Final = 15_000
"""Longer than it takes to miss an executor."""
SLACK_SECONDS: Final = 3.0
"""For a busy machine; a chunk that waited for its lease would be later still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What happens to an executor.

    Attributes:
        kill: whether it is killed, and started again afterwards.
        freeze: whether it is stopped for as long.
        bus: whether it is cut off from the broker.
        store: whether it is cut off from the store.
        half: whether only what they send is lost.
        elsewhere: whether somebody else must run its lines.
    """

    kill: bool = False
    freeze: bool = False
    bus: bool = False
    store: bool = False
    half: bool = False
    elsewhere: bool = True


CUTS: Final = {
    "killed": Cut(kill=True),
    "frozen": Cut(freeze=True),
    "bus": Cut(bus=True),
    "store": Cut(store=True),
    "both": Cut(bus=True, store=True),
    "half-store": Cut(store=True, half=True),
    # Its words still hold its messages, and its results arrive: it is alive, and keeps its lines.
    "half-bus": Cut(bus=True, half=True, elsewhere=False),
}


class Victim:
    """An executor process that reaches store and bus through proxies."""

    def __init__(self, process: ServiceProcess, bus: TcpProxy, store: TcpProxy) -> None:
        self.process = process
        self.bus = bus
        self.store = store

    @contextlib.asynccontextmanager
    async def gone(self, how: Cut) -> AsyncIterator[None]:
        """Have it as good as dead meanwhile."""
        if how.kill:
            await self.process.kill()
            yield
            self.process.start()
            await self.process.ready()
        elif how.freeze:
            self.process.send(signal.SIGSTOP)
            yield
            self.process.send(signal.SIGCONT)
        else:
            with self._cut_off(how):
                yield

    @contextlib.contextmanager
    def _cut_off(self, how: Cut) -> Iterator[None]:
        """Let nothing through meanwhile."""
        proxies = [self.bus] * how.bus + [self.store] * how.store
        with contextlib.ExitStack() as stack:
            for proxy in proxies:
                if how.half:
                    proxy.lose_answers = True
                else:
                    stack.enter_context(proxy.parted())
            yield
        if how.half:
            for proxy in proxies:
                proxy.lose_answers = False
                # What is left of these connections makes no sense to anybody.
                proxy.cut()


class Scene:
    """One kind of cut, played in a pool of its own."""

    def __init__(self, name: str, fleet: Services, gateway: Gateway, nats_url: str) -> None:
        self.name = name
        self.cut = CUTS[name]
        self.fleet = fleet
        self.started_dir = fleet.folder / "started"
        self.nats_url = nats_url
        self.client = AsyncOpenAI(base_url=gateway.base_url, api_key="x", max_retries=8)

    async def play(self) -> None:
        """Cut an executor off while it holds a batch, join it again, and have it work on."""
        async with self.client, self._victim() as victim:
            lines = chats(LINES, "long", model=self.name, x_simulate={"delay_ms": LINE_MS})
            lines += [line | {"custom_id": f"short-{n}"} for n, line in enumerate(self._short(2))]
            watch = Watch(self.client, await submit(self.client, lines))
            await eventually(
                lambda: len(self._started(watch, "victim")) == len(lines), within_seconds=30
            )
            async with self._helper():
                before = _cost(victim.process)
                cut_at = time.time()
                async with victim.gone(self.cut):
                    await self._wait_for_others(watch, cut_at)
                    if not self.cut.kill:
                        _check_cost(before, _cost(victim.process))
                batch = await watch.end(60)
                found = await outcome(self.client, batch, ids(lines))
                assert found.counts == (len(lines), len(lines), 0)
                check_answers(found, lines)
                assert max(executions(self._started(watch)).values()) <= 2
                await self._works_on()

    async def _wait_for_others(self, watch: Watch, cut_at: float) -> None:
        if not self.cut.elsewhere:
            await asyncio.sleep(ACK_WAIT_SECONDS + BEAT_SECONDS)
            return
        limit = ACK_WAIT_SECONDS + BEAT_SECONDS + SLACK_SECONDS
        taken = await eventually(
            lambda: found if len(found := self._started(watch, "helper")) >= LINES else [],
            within_seconds=2 * limit,
        )
        assert max(each.at for each in taken) - cut_at <= limit, self.name

    async def _works_on(self) -> None:
        lines = self._short(256)
        watch = Watch(self.client, await submit(self.client, lines))
        found = await outcome(self.client, await watch.end(60), ids(lines))
        assert found.counts == (len(lines), len(lines), 0)
        assert self._started(watch, "victim"), f"{self.name}: it takes no work any more"

    def _short(self, count: int) -> list[dict[str, object]]:
        return chats(count, "short", model=self.name, x_simulate={"delay_ms": 1_000})

    def _started(self, watch: Watch, executor: str = "") -> list[Started]:
        name = f"{executor}-{self.name}" if executor else ""
        return [
            each
            for each in read_started(self.started_dir)
            if each.batch_id == watch.batch.id and (not name or each.executor == name)
        ]

    @contextlib.asynccontextmanager
    async def _victim(self) -> AsyncIterator[Victim]:
        bus_port = int(self.nats_url.rpartition(":")[2])
        store_port = int(self.fleet.stores[0].address.rpartition(":")[2])
        async with TcpProxy(bus_port) as bus, TcpProxy(store_port) as store:
            process = self.fleet.executor(
                f"victim-{self.name}",
                MODELS=self.name,
                STORE=f"127.0.0.1:{store.port}",
            )
            process.settings["NIGHTSHIFT_NATS_URL"] = f"nats://127.0.0.1:{bus.port}"
            await self.fleet.start(process)
            yield Victim(process, bus, store)
            await process.kill()

    @contextlib.asynccontextmanager
    async def _helper(self) -> AsyncIterator[None]:
        """Another executor of the pool, in this process."""
        name = f"helper-{self.name}"
        bus = await buses.connect(self.nats_url, name)
        channel = rpc.open_channel(self.fleet.stores[0].address)
        stopping = asyncio.Event()

        async def on_ready(_ready: bool) -> None:
            return None

        executor = Executor(
            Identity(
                executor_id=name,
                pool_id=pool_id_of(self.name),
                models=(self.name,),
                line_timeout_seconds=60.0,
                drain_seconds=0.0,
            ),
            engine=SimulatedEngine(started=StartedFile(self.started_dir, f"{name}.0")),
            bus=bus,
            store=StoreClient(channel, secret=self.fleet.secret, executor_id=name, incarnation="0"),
            clock=SystemClock(),
            chance=lambda: 0.5,
            on_ready=on_ready,
        )
        life = asyncio.create_task(executor.run(stopping))
        await eventually(lambda: executor.presence.ready, within_seconds=30)
        try:
            yield
        finally:
            stopping.set()
            await life
            await bus.close()
            await channel.close()


def _cost(process: ServiceProcess) -> tuple[float, float, int]:
    """When, processor time so far, and lines logged so far."""
    times = psutil.Process(process.pid).cpu_times()
    return time.monotonic(), times.user + times.system, len(process.log(1 << 30).splitlines())


def _check_cost(before: tuple[float, float, int], after: tuple[float, float, int]) -> None:
    """Nobody spins while nothing gets through."""
    seconds, used, said = (later - one for one, later in zip(before, after, strict=True))
    assert used < 0.3 * seconds, (used, seconds)
    assert said < 10 * seconds, said


async def test_whatever_becomes_of_an_executor(tmp_path: Path, nats_server: NatsServer) -> None:
    """All kinds at once: most of it is waiting."""
    settings = started_to(tmp_path / "fleet" / "started")
    async with services(tmp_path / "fleet", nats_server.url, settings) as fleet:
        await fleet.start(fleet.store())
        gateway = fleet.gateway("gateway-0")
        await fleet.start(gateway, fleet.scheduler("scheduler-0"))
        scenes = [Scene(name, fleet, gateway, nats_server.url) for name in CUTS]
        results = await asyncio.gather(*(each.play() for each in scenes), return_exceptions=True)
        faults = {
            scene.name: repr(result)
            for scene, result in zip(scenes, results, strict=True)
            if isinstance(result, BaseException)
        }
        assert not faults, faults
