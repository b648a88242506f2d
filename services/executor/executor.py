"""The executor put together: what knows whom, and in which order it starts and stops."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

from protos.nightshift.v1 import dispatch_pb2, work_pb2
from services.executor.attempts import Attempt, Attempts
from services.executor.chunks.endings import Endings, Tasks
from services.executor.chunks.keep_alive import BEAT_SECONDS, Keeper
from services.executor.chunks.opener import Opener
from services.executor.chunks.puller import ChunkPuller
from services.executor.chunks.store_reach import Reach
from services.executor.engine_life import Supervisor
from services.executor.engines.base import Engine
from services.executor.lines.engine_death import Death
from services.executor.lines.reporter import FLUSH_TICK_SECONDS, Reporter
from services.executor.lines.runner import Runner
from services.executor.presence.beats import Presence
from services.executor.registration import Registration
from services.executor.store_client import StoreClient
from services.kit.messages.bus import Bus
from services.kit.process.clock import Clock
from services.kit.process.log import get_logger
from services.kit.process.loop import Loop
from services.kit.process.tasks import end
from services.kit.wire.ids import PoolId

_log = get_logger(__name__)

TICK_SECONDS: Final = 1.0
LEAVING_SECONDS: Final = 4.0
"""What a draining executor takes at most beyond the time that its lines get."""
SETTLE_SECONDS: Final = 0.5
"""For steps in the background, such as an answer to the broker."""

_STOPS: Final = frozenset(
    {
        dispatch_pb2.EVENT_KIND_BATCH_CANCELLING,
        dispatch_pb2.EVENT_KIND_BATCH_EXPIRING,
        # No result is taken any more, and the store has closed the attempts.
        dispatch_pb2.EVENT_KIND_BATCH_SEALED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who an executor is and what it serves."""

    executor_id: str
    pool_id: PoolId
    models: tuple[str, ...]
    line_timeout_seconds: float
    drain_seconds: float
    stall_limit_seconds: float | None = None


class Executor:
    """Runs chunks from the bus through an engine, until it is drained."""

    def __init__(
        self,
        identity: Identity,
        *,
        engine: Engine,
        bus: Bus,
        store: StoreClient,
        clock: Clock,
        chance: Callable[[], float],
        on_ready: Callable[[bool], Coroutine[Any, Any, None]],
    ) -> None:
        """Put the parts together; nothing runs before `run`.

        Args:
            identity: who it is.
            engine: not started yet.
            bus: connected.
            store: the store's calls.
            clock: time.
            chance: random numbers in [0, 1).
            on_ready: run when the engine begins or ceases to take work.
        """
        self._identity = identity
        self._engine = engine
        self._bus = bus
        self._store = store
        self._clock = clock
        self._chance = chance
        self._on_ready = on_ready
        self._tasks = Tasks()
        self.attempts = Attempts()
        self._endings = Endings(attempts=self.attempts, store=store, tasks=self._tasks, clock=clock)
        self._reporter = self._make_reporter()
        self.runner = self._make_runner()
        self.presence = self._make_presence()
        self._registration = self._make_registration()
        self._supervisor = self._make_supervisor()
        reach = Reach(store, chance)
        self._puller = self._make_puller(reach)
        self._keeper = Keeper(
            store=store, attempts=self.attempts, endings=self._endings, reach=reach, clock=clock
        )
        self._beat_loop = Loop("beat", self._keeper.beat_once, tick_seconds=BEAT_SECONDS)
        self._presence_loop = Loop("presence", self.presence.run_once, tick_seconds=TICK_SECONDS)
        self._endings.serve(self.runner, self._reporter)
        self._reporter.on_room(self.runner.wake)
        for call in (self.runner.wake, self._puller.wake, self.presence.changed):
            self.attempts.on_change(call)

    def _make_reporter(self) -> Reporter:
        return Reporter(
            store=self._store,
            attempts=self.attempts,
            clock=self._clock,
            chance=self._chance,
            on_durable=self._endings.finish,
            on_sealed=lambda one: self._drop([one], work_pb2.DROP_REASON_DONE),
            on_refused=lambda one, why: self._endings.give_up(
                one, f"the store does not take its results ({why})"
            ),
        )

    def _make_runner(self) -> Runner:
        return Runner(
            attempts=self.attempts,
            reporter=self._reporter,
            clock=self._clock,
            chance=self._chance,
            line_timeout_seconds=self._identity.line_timeout_seconds,
            on_death=self._died,
            # What may end this whole process is known to the store before it does.
            on_alone=lambda: self._beat_loop.wake(),
        )

    def _make_presence(self) -> Presence:
        return Presence(
            executor_id=self._identity.executor_id,
            pool_id=self._identity.pool_id,
            bus=self._bus,
            attempts=self.attempts,
            runner=self.runner,
            tasks=self._tasks,
            clock=self._clock,
            on_ready=self._ready,
        )

    def _make_registration(self) -> Registration:
        return Registration(
            store=self._store,
            pool_id=self._identity.pool_id,
            models=self._identity.models,
            chance=self._chance,
            on_refused=self._refused,
        )

    def _make_supervisor(self) -> Supervisor:
        return Supervisor(
            engine=self._engine,
            presence=self.presence,
            runner=self.runner,
            endings=self._endings,
            on_started=lambda: self._registration.present(self._engine),
            clock=self._clock,
            chance=self._chance,
            stall_limit_seconds=self._identity.stall_limit_seconds,
        )

    def _make_puller(self, reach: Reach) -> ChunkPuller:
        opener = Opener(
            store=self._store,
            attempts=self.attempts,
            endings=self._endings,
            runner=self.runner,
            tasks=self._tasks,
            reach=reach,
            clock=self._clock,
            chance=self._chance,
        )
        return ChunkPuller(
            bus=self._bus,
            pool_id=self._identity.pool_id,
            attempts=self.attempts,
            endings=self._endings,
            opener=opener,
            presence=self.presence,
            reach=reach,
            clock=self._clock,
            chance=self._chance,
        )

    async def run(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set, then drain.

        Raises:
            ExceptionGroup: a part failed in a way that nobody foresaw; start the process again.
        """
        await self._bus.on_event(self._on_event)
        ticks = (
            self._presence_loop,
            self._beat_loop,
            Loop("keep", self._keeper.keep_once, tick_seconds=TICK_SECONDS),
            Loop("send_old", self._reporter.send_old, tick_seconds=FLUSH_TICK_SECONDS),
            Loop("expire_lines", self.runner.expire_lines, tick_seconds=self._expiry_tick()),
        )
        async with asyncio.TaskGroup() as group:
            parts = [group.create_task(loop.run()) for loop in ticks]
            parts.append(group.create_task(self.runner.run()))
            parts.append(group.create_task(self._reporter.run()))
            parts.append(group.create_task(self._puller.run()))
            parts.append(group.create_task(self._registration.begin()))
            engine_life = group.create_task(self._supervisor.run())
            parts.append(engine_life)
            await stopping.wait()
            await self._drain(engine_life)
            for loop in ticks:
                loop.stop()
            await end(*parts)

    def _expiry_tick(self) -> float:
        return min(1.0, self._identity.line_timeout_seconds / 10)

    async def _drain(self, engine_life: asyncio.Task[None]) -> None:
        """Finish what runs, give the rest back at once, leave.

        Lines that are in the engine get `drain_seconds`, and all else `LEAVING_SECONDS` more,
        whatever does not answer: a preemption notice names a time.
        """
        _log.info("draining", lines_in_engine=self.runner.in_flight)
        began = asyncio.get_running_loop().time()
        self._puller.stop()
        self.runner.stop_feeding()
        # A death from now on is no reason to start anew.
        engine_life.cancel()
        self.presence.set_state(
            dispatch_pb2.ENGINE_STATE_DRAINING, seats=self.presence.seats, reason="it is stopping"
        )
        await self._run_out()
        await self._endings.hand_back(self.attempts)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(began + self._identity.drain_seconds + LEAVING_SECONDS):
                await self._tasks.settle(SETTLE_SECONDS)
                await self.presence.leave()
                await self._engine.close()
                return
        _log.error("engine_does_not_close")

    async def _run_out(self) -> None:
        """Let the lines in the engine finish; what has none there is handed back meanwhile."""
        until = asyncio.get_running_loop().time() + self._identity.drain_seconds
        moved = asyncio.Event()
        self.attempts.on_change(moved.set)
        while self.runner.in_flight:
            moved.clear()
            idle = [one for one in self.attempts if not one.running and not one.closed]
            if idle:
                self._tasks.spawn(self._endings.hand_back(idle))
            try:
                async with asyncio.timeout_at(until):
                    await moved.wait()
            except TimeoutError:
                _log.warning("lines_given_back", lines=self.runner.in_flight)
                return

    def _ready(self, ready: bool) -> None:
        self._tasks.spawn(self._on_ready(ready))
        self._puller.wake()
        self._presence_loop.wake()

    def _refused(self, reason: str) -> None:
        self.presence.set_state(dispatch_pb2.ENGINE_STATE_DEAD, reason=reason)

    def _died(self, death: Death) -> None:
        self._supervisor.died(death)

    def _drop(self, attempts: Iterable[Attempt], reason: "work_pb2.DropReason.ValueType") -> None:
        self._endings.drop(attempts, reason)

    async def _on_event(self, event: dispatch_pb2.Event) -> None:
        # Only the store's word stops what runs; the event has it asked at once.
        if event.kind in _STOPS and self.attempts.of_batch(event.batch_id):
            self._beat_loop.wake()
