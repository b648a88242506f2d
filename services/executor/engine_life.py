"""Life of the engine: start, watch, bury, start again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import prometheus_client

from protos.nightshift.v1 import dispatch_pb2
from services.executor.chunks.endings import Endings
from services.executor.engine_stall import Stall
from services.executor.engines.base import (
    Engine,
    EngineDead,
    EngineStartError,
)
from services.executor.lines.engine_death import Death
from services.executor.lines.retry import Backoff
from services.executor.lines.runner import Runner
from services.executor.presence.beats import Presence
from services.kit.process.clock import Clock
from services.kit.process.log import get_logger

_log = get_logger(__name__)

State = dispatch_pb2.EngineState

WATCH_SECONDS: Final = 0.5
RAN_A_WHILE_SECONDS: Final = 60.0
"""An engine that lived for so long, or answered a line, dies for a reason of its own."""

_DEATHS = prometheus_client.Counter(
    "nightshift_executor_engine_deaths_total", "Deaths of the engine, hangs included."
)


class Supervisor:
    """Sees that there is an engine, or that it is known why there is none."""

    def __init__(
        self,
        *,
        engine: Engine,
        presence: Presence,
        runner: Runner,
        endings: Endings,
        on_started: Callable[[], Awaitable[None]],
        clock: Clock,
        chance: Callable[[], float],
        stall_limit_seconds: float | None = None,
    ) -> None:
        """Make a supervisor of an engine that was not started.

        Args:
            engine: started again and again, as often as it dies.
            presence: told of every change.
            runner: runs lines on it, and reports its death by `died`.
            endings: buries the attempts that it dies with.
            on_started: awaited after each start, before the engine gets work.
            clock: measures how long it lived.
            chance: random numbers in [0, 1), for jitter.
            stall_limit_seconds: time without a step, with work waiting, that is a death at the
                least; None for what the engine says.
        """
        self._engine = engine
        self._presence = presence
        self._runner = runner
        self._endings = endings
        self._on_started = on_started
        self._stall_limit_seconds = stall_limit_seconds
        self._stall = Stall()
        self._clock = clock
        self._start_backoff = Backoff(0.5, 30.0, chance)
        # Deaths are part of finding a poison line; only deaths in a row without any answer wait.
        self._death_backoff = Backoff(0.05, 2.0, chance)
        self._start_seconds = 0.0
        self._death: asyncio.Future[Death] | None = None

    def died(self, death: Death) -> None:
        """Take the runner's word that the engine is dead, with the lines that were in it."""
        if self._death is not None and not self._death.done():
            self._death.set_result(death)

    async def run(self) -> None:
        """Keep an engine running until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._start()
            await self._on_started()
            death = self._death = loop.create_future()
            self._runner.use(self._engine)
            self._presence.set_state(State.ENGINE_STATE_READY, seats=self._engine.seats)
            _log.info("engine_ready", engine=self._engine.name, seats=self._engine.seats)
            answered_before, born = self._runner.answered, self._clock.monotonic()
            while not death.done():
                await asyncio.wait([death], timeout=WATCH_SECONDS)
                self._watch()
            self._bury(death.result())
            lived = self._clock.monotonic() - born
            if self._runner.answered > answered_before or lived >= RAN_A_WHILE_SECONDS:
                self._death_backoff.reset()
            await asyncio.sleep(self._death_backoff.next_seconds())

    def _bury(self, death: Death) -> None:
        _DEATHS.inc()
        lines = sum(len(one) for one in death.casualties.values())
        _log.error("engine_died", reason=death.reason, lines=lines)
        self._presence.set_state(State.ENGINE_STATE_DEAD, reason=death.reason)
        # In the background: a new engine need not wait for the store.
        self._endings.bury(death, self._start_seconds)

    def _watch(self) -> None:
        """Notice a death that no call has told."""
        try:
            self._engine.check_health()
        except EngineDead as error:
            self._runner.die(str(error) or "the engine died")
            return
        reason = self._stall.judge(
            self._engine.stalled_seconds(),
            at_least_seconds=self._stall_limit_seconds or self._engine.stall_limit_seconds,
        )
        if reason:
            self._runner.die(reason)

    async def _start(self) -> None:
        while True:
            self._presence.set_state(
                State.ENGINE_STATE_STARTING, reason=f"the {self._engine.name} engine is starting"
            )
            try:
                began = self._clock.monotonic()
                await self._engine.close()
                await self._engine.start()
                self._start_seconds = self._clock.monotonic() - began
            except (EngineStartError, EngineDead) as error:
                await self._failed_to_start(str(error))
            except Exception as error:  # noqa: BLE001 -- MemoryError, OSError, an adapter's fault
                _log.exception("engine_start_failed_unforeseen")
                await self._failed_to_start(f"{type(error).__name__}: {error}")
            else:
                self._start_backoff.reset()
                return

    async def _failed_to_start(self, reason: str) -> None:
        """Say why there is no engine, and wait longer each time."""
        wait = self._start_backoff.next_seconds()
        _log.error("engine_start_failed", reason=reason, again_in_seconds=round(wait, 1))
        self._presence.set_state(State.ENGINE_STATE_DEAD, reason=reason)
        await asyncio.sleep(wait)
