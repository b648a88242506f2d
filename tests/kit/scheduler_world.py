"""A scheduler in this process, or several, between a real nats-server and a scripted store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from protos.nightshift.v1 import dispatch_pb2
from services.kit.calls import rpc
from services.kit.messages import bus, subjects
from services.kit.messages.bus import Bus
from services.kit.process.clock import SystemClock
from services.kit.process.tasks import end
from services.kit.wire.ids import PoolId, pool_id_of
from services.scheduler.domain.policies.fifo import Fifo
from services.scheduler.scheduler import Scheduler
from services.scheduler.work_client import WorkClient
from tests.kit.eventually import eventually
from tests.kit.nats_server import NatsServer
from tests.kit.scripted_puller import ScriptedPuller
from tests.kit.scripted_window import SECRET, ScriptedWindow

POOL = pool_id_of("llama")
OTHER = pool_id_of("qwen")


@dataclass(frozen=True)
class RunningScheduler:
    """A scheduler in this process."""

    stopping: asyncio.Event
    task: asyncio.Task[None]

    async def stop(self) -> None:
        """Let it drain."""
        self.stopping.set()
        await asyncio.wait([self.task])

    async def vanish(self) -> None:
        """End it without a word, as a kill does."""
        await end(self.task)


@dataclass
class World:
    """A broker, a store, and schedulers that are started one by one."""

    nats_server: NatsServer
    work: ScriptedWindow
    store_port: int
    bus: Bus
    stack: contextlib.AsyncExitStack

    async def scheduler(
        self, name: str, *, tick_seconds: float = 60.0, nats_url: str = "", replicas: int = 1
    ) -> "RunningScheduler":
        """Start a scheduler; it is stopped at the end, if not before."""
        connection = await bus.connect(nats_url or self.nats_server.url, name, replicas=replicas)
        self.stack.push_async_callback(connection.close)
        channel = rpc.open_channel(f"127.0.0.1:{self.store_port}")
        self.stack.push_async_callback(channel.close)
        scheduler = Scheduler(
            bus=connection,
            client=WorkClient(channel, SECRET),
            policy=Fifo(),
            clock=SystemClock(),
            holder=name,
            tick_seconds=tick_seconds,
        )
        stopping = asyncio.Event()
        running = RunningScheduler(stopping, asyncio.create_task(scheduler.run(stopping)))
        self.stack.push_async_callback(running.stop)
        return running

    async def leads(self, name: str) -> None:
        """Wait until a scheduler leads and has seen the window."""
        await eventually(lambda: self.work.holder == name and self.work.called("GetWindow"))

    async def tell(self, kind: dispatch_pb2.EventKind, batch_id: str = "") -> None:
        """Publish an event as the store's outbox does."""
        event = dispatch_pb2.Event(kind=kind, batch_id=batch_id, pool_id=POOL)
        message_id = f"outbox-{batch_id}-{kind}"
        await self.bus.publish_event(
            subjects.event_subject(event), event.SerializeToString(), message_id
        )

    async def ready(self, batch_id: str, lines: int, pool_id: PoolId = POOL) -> None:
        """Make a batch ready, and tell."""
        self.work.add_batch(batch_id, pool_id, lines)
        await self.tell(dispatch_pb2.EVENT_KIND_BATCH_READY, batch_id)


@pytest.fixture
async def world(nats_server: NatsServer) -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        connection = await bus.connect(nats_server.url, "test")
        stack.push_async_callback(connection.close)
        await connection.ensure_streams()
        work = ScriptedWindow()
        work.pool_ids = [POOL, OTHER]
        server = await work.serve()
        stack.push_async_callback(server.server.stop, 0)
        yield World(nats_server, work, server.port, connection, stack)


def lines_of(executor: ScriptedPuller) -> int:
    return sum(each.line_count for each in executor.received)
