"""One scheduler: its parts, what wakes them, and its life."""

import asyncio
from typing import Final

from protos.nightshift.v1 import dispatch_pb2
from services.kit.messages.bus import Bus
from services.kit.process.clock import Clock
from services.kit.process.loop import Loop
from services.kit.process.tasks import end
from services.scheduler.dispatcher import Dispatcher
from services.scheduler.domain.policies.base import Policy
from services.scheduler.leader import RENEW_SECONDS, Leader
from services.scheduler.pool_reports import PoolReporter
from services.scheduler.queues import Queues
from services.scheduler.reconciler import Reconciler
from services.scheduler.registry import Registry
from services.scheduler.work_client import WorkClient

RECONCILE_SECONDS: Final = 1.0
# A turn takes milliseconds, or waits for a store or a broker that may be stopping as well.
_DRAIN_SECONDS: Final = 2.0


class Scheduler:
    """Leads or stands by; made once for each process."""

    def __init__(
        self,
        *,
        bus: Bus,
        client: WorkClient,
        policy: Policy,
        clock: Clock,
        holder: str,
        tick_seconds: float,
    ) -> None:
        """Put the parts together; does nothing until `run`.

        Args:
            bus: the broker, connected.
            client: calls the store.
            policy: order of the batches of a pool.
            clock: what the parts measure time by.
            holder: this scheduler's name, unique in the fleet.
            tick_seconds: how often the window slides without an event.
        """
        self._bus = bus
        self._registry = Registry(clock)
        self._leader = Leader(client, holder=holder, clock=clock, on_change=self._wake)
        self._queues = Queues(bus, self._leader, clock)
        self._dispatcher = Dispatcher(
            client=client,
            leader=self._leader,
            registry=self._registry,
            queues=self._queues,
            policy=policy,
            clock=clock,
            tick_seconds=tick_seconds,
        )
        self._reconciler = Reconciler(
            bus=bus,
            client=client,
            leader=self._leader,
            registry=self._registry,
            queues=self._queues,
            reporter=PoolReporter(client, self._registry, clock),
        )
        self._leading = Loop("lead", self._leader.run_once, tick_seconds=RENEW_SECONDS)
        # A turn without work costs microseconds; the window slides by its own tick.
        self._dispatching = Loop(
            "dispatch", self._dispatcher.run_once, tick_seconds=RECONCILE_SECONDS
        )
        self._reconciling = Loop("reconcile", self._reconcile, tick_seconds=RECONCILE_SECONDS)

    async def run(self, stopping: asyncio.Event) -> None:
        """Run until `stopping` is set, end the turns in progress, give leadership up."""
        await self._bus.on_event(self._on_event)
        await self._bus.on_room(self._on_room)
        loops = (self._leading, self._dispatching, self._reconciling)
        tasks = [asyncio.create_task(loop.run()) for loop in loops]
        try:
            await stopping.wait()
            for loop in loops:
                loop.stop()
            await asyncio.wait(tasks, timeout=_DRAIN_SECONDS)
        finally:
            for loop in loops:
                loop.stop()
            await end(*tasks)
        await self._leader.resign()

    async def _reconcile(self) -> None:
        await self._reconciler.run_once()
        # What was learnt of executors and queues may be room.
        self._dispatching.wake()

    async def _on_event(self, event: dispatch_pb2.Event) -> None:
        if event.kind == dispatch_pb2.EVENT_KIND_CHUNKS_FREED:
            self._reconciling.wake()
            return
        self._dispatcher.note(event)
        self._dispatching.wake()

    async def _on_room(self, beat: dispatch_pb2.ExecutorBeat) -> None:
        self._registry.hear(beat)
        self._queues.note_opened(beat)
        self._dispatching.wake()

    def _wake(self) -> None:
        self._reconciling.wake()
        self._dispatching.wake()
