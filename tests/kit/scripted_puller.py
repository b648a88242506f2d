"""An executor that only pulls: it says what room it has, and notes what it is sent."""

import asyncio
import time
from typing import Self

from protos.nightshift.v1 import dispatch_pb2
from services.kit.messages.bus import Bus, BusFault
from services.kit.process.tasks import end
from services.kit.wire.ids import PoolId


class ScriptedPuller:
    """Holds every line it is sent until `finish`; its marks are the test's to choose."""

    def __init__(
        self,
        bus: Bus,
        pool_id: PoolId,
        *,
        name: str = "executor-0",
        low: int = 100,
        high: int = 200,
    ) -> None:
        """Speak and pull over `bus`; does so while the context is open."""
        self._bus = bus
        self._pool_id = pool_id
        self._name = name
        self.low = low
        self.high = high
        self.seats = 64
        self.lines_per_second = 0.0
        self.held_lines = 0
        self.received: list[dispatch_pb2.Dispatch] = []
        #: When each of them arrived, in seconds of the event loop's clock.
        self.received_at: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Begin to pull and to beat."""
        self._tasks = [asyncio.create_task(self._pull()), asyncio.create_task(self._beat())]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Fall silent, as one that was killed."""
        await end(*self._tasks)

    def lines(self) -> list[tuple[str, int, int]]:
        """Return (batch, first line, number of lines) of what was received, in order."""
        return [
            (each.batch_id, span.first, span.count) for each in self.received for span in each.lines
        ]

    async def finish(self, lines: int) -> None:
        """Be done with `lines` of those held, and say so."""
        self.held_lines -= lines
        await self._bus.say_room(self.word())

    def word(self, opened: list[str] | None = None) -> dispatch_pb2.ExecutorBeat:
        """Return what it says of itself now."""
        return dispatch_pb2.ExecutorBeat(
            executor_id=self._name,
            pool_id=self._pool_id,
            at_ms=int(time.time() * 1000),
            seats=self.seats,
            held_lines=self.held_lines,
            low_water=self.low,
            high_water=self.high,
            lines_per_second=self.lines_per_second,
            engine_state=dispatch_pb2.ENGINE_STATE_READY,
            opened=opened or [],
        )

    async def _beat(self) -> None:
        while True:
            try:
                await self._bus.put_beat(self.word())
                await self._bus.say_room(self.word())
            except BusFault:
                pass  # said again a moment later
            await asyncio.sleep(0.2)

    async def _pull(self) -> None:
        while True:
            try:
                puller = await self._bus.pull_from(self._pool_id)
                while True:
                    await self._take(await puller.fetch(64))
            except BusFault:
                await asyncio.sleep(0.02)  # its queue is made by the scheduler

    async def _take(self, deliveries: list) -> None:
        now = asyncio.get_running_loop().time()
        for delivery in deliveries:
            self.received.append(delivery.dispatch)
            self.received_at.append(now)
            self.held_lines += delivery.dispatch.line_count
        if deliveries:
            opened = [f"{each.dispatch.chunk_id}:{each.dispatch.dispatch}" for each in deliveries]
            await self._bus.say_room(self.word(opened))
            await asyncio.gather(*(each.ack() for each in deliveries))
