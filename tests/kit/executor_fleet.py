"""Executors between a real nats-server and a scripted store, over real sockets."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from protos.nightshift.v1 import dispatch_pb2
from services.executor.engines.simulated.engine import SimulatedEngine
from services.executor.executor import Executor, Identity
from services.executor.store_client import StoreClient
from services.kit.calls import rpc
from services.kit.messages import bus as buses
from services.kit.messages import subjects
from services.kit.process.clock import SystemClock
from services.kit.wire.ids import pool_id_of
from tests.kit.eventually import eventually
from tests.kit.nats_server import NatsServer
from tests.kit.scripted_store import SECRET, ScriptedWork, chat_line, start_scripted_store

POOL = pool_id_of("m")


class Fleet:
    """A scripted store, a bus and executors."""

    def __init__(self, bus: buses.Bus, nats_url: str) -> None:
        self.bus = bus
        self.nats_url = nats_url
        self.work = ScriptedWork()
        self.server: rpc.RunningServer | None = None
        self.rooms: list[dispatch_pb2.ExecutorBeat] = []
        #: What executors said of themselves to whoever asks whether they take work, in order.
        self.said_ready: list[bool] = []
        self._closers: list[asyncio.Task[None]] = []
        self._stops: list[asyncio.Event] = []

    async def serve(self, listen: str = "127.0.0.1:0") -> None:
        self.server = await start_scripted_store(self.work, listen)

    @property
    def address(self) -> str:
        assert self.server is not None
        return f"127.0.0.1:{self.server.port}"

    async def start(
        self,
        *,
        engine: SimulatedEngine | None = None,
        name: str = "executor-0",
        line_timeout_seconds: float = 60.0,
        drain_seconds: float = 5.0,
        stall_limit_seconds: float | None = None,
        store: str | None = None,
    ) -> Executor:
        """Start an executor; `store` is the address at which it finds the store."""
        bus = await buses.connect(self.nats_url, name)
        channel = rpc.open_channel(store or self.address)
        stop = asyncio.Event()

        async def on_ready(ready: bool) -> None:
            self.said_ready.append(ready)

        executor = Executor(
            Identity(
                executor_id=name,
                pool_id=POOL,
                models=("m",),
                line_timeout_seconds=line_timeout_seconds,
                drain_seconds=drain_seconds,
                stall_limit_seconds=stall_limit_seconds,
            ),
            engine=engine or SimulatedEngine(),
            bus=bus,
            store=StoreClient(channel, secret=SECRET, executor_id=name, incarnation="1"),
            clock=SystemClock(),
            chance=lambda: 0.0,
            on_ready=on_ready,
        )

        async def live() -> None:
            try:
                await executor.run(stop)
            finally:
                await bus.close()
                await channel.close()

        self._closers.append(asyncio.create_task(live()))
        self._stops.append(stop)
        return executor

    async def stop(self, index: int = 0) -> None:
        self._stops[index].set()
        await self._closers[index]

    async def close(self) -> None:
        for stop in self._stops:
            stop.set()
        await asyncio.gather(*self._closers)
        if self.server is not None:
            await self.server.drain(0)

    async def publish(self, *dispatches: dispatch_pb2.Dispatch) -> None:
        for dispatch in dispatches:
            await self.bus.publish_dispatch(dispatch)

    async def unacked(self) -> int:
        """Messages of the pool that are not dealt with."""
        info = await self.bus._jetstream.consumer_info("WORK", subjects.durable_of(POOL))
        return (info.num_pending or 0) + (info.num_ack_pending or 0)

    async def settled(self, within_seconds: float = 10.0) -> None:
        async def none_left() -> bool:
            return await self.unacked() == 0

        await eventually(none_left, within_seconds=within_seconds)


@pytest.fixture
async def fleet(nats_server: NatsServer) -> AsyncIterator[Fleet]:
    bus = await buses.connect(nats_server.url, "test")
    await bus.ensure_streams()
    await bus.ensure_consumer(POOL)
    fleet = Fleet(bus, nats_server.url)
    await fleet.serve()

    async def heard(beat: dispatch_pb2.ExecutorBeat) -> None:
        fleet.rooms.append(beat)

    await bus.on_room(heard)
    # A subscription counts once the broker has seen it.
    await bus._client.flush()
    yield fleet
    await fleet.close()
    await bus.close()


def lines(count: int, **body: object) -> list[bytes]:
    return [chat_line(f"id-{i}", f"hello {i}", **body) for i in range(count)]
