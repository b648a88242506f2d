"""Feeds the engine: keeps its seats full from all attempts at once, earlier ones first.

All of it runs in one event loop and never blocks it for longer than one slice of lines.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import prometheus_client

from services.executor.attempts import Attempt, Attempts, Running
from services.executor.engines.base import (
    NO_USAGE,
    Engine,
    EngineDead,
    EngineRequest,
    EngineResponse,
    Usage,
)
from services.executor.engines.bodies.bounds import sequences_in
from services.executor.input_lines import Line
from services.executor.lines.engine_death import Casualties, Death
from services.executor.lines.lineup import Lineup
from services.executor.lines.reporter import Reporter
from services.executor.lines.retry import Again, judge
from services.executor.lines.seating import Seating
from services.executor.lines.stand_in_answers import UNREADABLE, failure, has_result, submitted
from services.executor.lines.standstill import Standstill
from services.executor.presence.room import Speed
from services.kit.process import failpoints
from services.kit.process.clock import Clock
from services.kit.process.log import get_logger
from services.kit.wire.frames import FAILED_FLAG
from services.kit.wire.result_line import REQUEST_TIMEOUT, no_response_line, success_or_error_line

_log = get_logger(__name__)

STEP_SECONDS: Final = 0.5
"""An engine without a step for longer may hang; whether it does shows later."""
ABORT_SECONDS: Final = 5.0
"""Bound on waiting for an engine to let aborted lines go; the watchdog sees to the rest."""

_RETRIES = prometheus_client.Counter(
    "nightshift_executor_retries_total", "Lines that run again after an engine's answer."
)
_IN_FLIGHT = prometheus_client.Gauge(
    "nightshift_executor_lines_in_engine", "Lines that are in the engine."
)


class Runner:
    """Runs the lines of all attempts through one engine."""

    def __init__(
        self,
        *,
        attempts: Attempts,
        reporter: Reporter,
        clock: Clock,
        chance: Callable[[], float],
        line_timeout_seconds: float,
        on_death: Callable[[Death], None],
        on_alone: Callable[[], None],
    ) -> None:
        """Make a runner without an engine.

        Args:
            attempts: whose lines it runs.
            reporter: takes the results.
            clock: measures speed and time-outs.
            chance: random numbers in [0, 1), for the jitter of retries.
            line_timeout_seconds: time in the engine after which a line is aborted.
            on_death: called once when the engine is found dead; it is without an engine then.
            on_alone: called when lines that run alone have entered the engine.
        """
        self._attempts = attempts
        self._reporter = reporter
        self._clock = clock
        self._chance = chance
        self._line_timeout_seconds = line_timeout_seconds
        self._longest_step_seconds = min(STEP_SECONDS, line_timeout_seconds / 4)
        self._on_death = on_death
        self._on_alone = on_alone
        self._engine: Engine | None = None
        # Callbacks of an engine that died belong to an earlier life and do nothing.
        self._life = 0
        self._running: dict[str, Running] = {}
        self._seating = Seating(1, 0)
        self._lineup = Lineup(attempts)
        self._wake = asyncio.Event()
        self._accepting = True
        self._speed = Speed(1)
        self._measured_at = clock.monotonic()
        self._standstill = Standstill(self._measured_at)
        self.answered = 0
        """Lines that got a result, since the start of this process."""

    # --- what others ask for ---------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Lines in the engine."""
        return len(self._running)

    @property
    def lines_per_second(self) -> float:
        """Speed of the engine while it works; 0 until known."""
        return self._speed.lines_per_second()

    def use(self, engine: Engine) -> None:
        """Run lines on `engine`, which is ready, from now on."""
        self._engine = engine
        # An engine that refills its seats by steps wants some lines queued inside.
        self._seating = Seating(engine.seats, int(getattr(engine, "queue_ahead", 0)))
        self._speed = Speed(engine.seats)
        self._measured_at = self._clock.monotonic()
        self._wake.set()

    def wake(self) -> None:
        """Look again whether lines can go in."""
        self._wake.set()

    def stop_feeding(self) -> None:
        """Let nothing more into the engine; what is in it goes on."""
        self._accepting = False

    def add(self, attempt: Attempt, lines: Iterable[Line]) -> None:
        """Take lines of an attempt that were read."""
        if attempt.closed:
            return
        for line in lines:
            line.seats = sequences_in(attempt.dispatch.endpoint, line.body)
            attempt.ready.append(line)
        self._lineup.add(attempt)
        self._wake.set()

    async def abort(self, attempts: Sequence[Attempt]) -> None:
        """Have the engine let go of all lines of these (closed) attempts; none gets a result."""
        request_ids: list[str] = []
        for attempt in attempts:
            attempt.ready.clear()
            for timer in attempt.waiting:
                timer.cancel()
            attempt.waiting.clear()
            for running in attempt.running.values():
                # Before the abort: an aborted call returns as if it had ended by itself.
                running.discard = True
                request_ids.append(running.request_id)
        await self._abort(request_ids)

    def die(self, reason: str) -> None:
        """Treat the engine as dead: take stock, and be without an engine."""
        if self._engine is None:
            return
        self._engine = None
        self._life += 1
        in_engine, self._running = self._running, {}
        casualties: Casualties = {}
        complete = True
        for running in in_engine.values():
            attempt = running.attempt
            attempt.running.pop(running.request_id, None)
            if running.discard or attempt.closed:
                complete = False
                continue
            if has_result(running.future):
                # It answered before it died; only our turn to hear it had not come.
                self._judge(attempt, running.line, running.request_id, running.future.result())
            else:
                casualties.setdefault(attempt, []).append(running.line.number)
        _IN_FLIGHT.set(0)
        self._attempts.changed()
        self._on_death(Death(reason=reason, casualties=casualties, complete=complete))

    async def expire_lines(self) -> None:
        """Abort lines that have been in the engine for too long; each becomes an error line.

        Not while the engine makes no step: that is the engine's fault and not theirs. It goes on,
        or is declared dead, and then they run again.
        """
        now = self._clock.monotonic()
        self._forgive(now)
        if self._engine is None or self._engine.stalled_seconds() > self._longest_step_seconds:
            return
        expired: list[Running] = []
        # All have the same limit, so the first to enter is the first to expire.
        for running in self._running.values():
            if now - running.started_at < self._line_timeout_seconds:
                break
            if not running.discard:
                expired.append(running)
        for running in expired:
            running.discard = True
            attempt, line = running.attempt, running.line
            text = no_response_line(
                attempt.dispatch.batch_id, line.number, line.custom_id, REQUEST_TIMEOUT
            )
            self._finish(attempt, line, text, FAILED_FLAG, NO_USAGE)
        if expired:
            _log.warning("lines_timed_out", lines=len(expired))
            await self._abort([running.request_id for running in expired])

    def _forgive(self, now: float) -> None:
        """Count no time in which this process was stopped, and the engine with it, to any line."""
        late = self._standstill.look(now)
        for running in self._running.values() if late else ():
            running.started_at += late

    async def run(self) -> None:
        """Feed the engine until cancelled."""
        while True:
            self._wake.clear()
            if self._feed():
                # One slice at a time: pulls, acknowledgements and beats go between.
                await asyncio.sleep(0)
            else:
                await self._wake.wait()

    # --- feeding ---------------------------------------------------------------------------------

    def _feed(self) -> bool:
        """Give the engine one slice of lines; False when it has no seat or there are no lines."""
        engine = self._engine
        if engine is None or not self._accepting or self._reporter.full:
            return False
        free = self._seating.free > 0
        attempt = self._lineup.first(len(self._running)) if free else None
        if attempt is None:
            return False
        started = self._measure(0)
        self._forgive(started)
        if attempt.answered_at <= self._standstill.last_at:
            # Others may have its lines by now: the next beat tells.
            return False
        left = attempt.left
        lines = self._seating.slice_of(attempt.ready)
        if not lines:
            return False
        self._submit(engine, attempt, lines, started)
        if attempt.dispatch.alone:
            self._on_alone()
        finished = left - attempt.left
        ended = self._clock.monotonic()
        self._speed.note(ended - started, finished)
        self._measured_at = ended
        if finished:
            self._attempts.changed()
        return True

    def _submit(
        self, engine: Engine, attempt: Attempt, lines: Sequence[Line], started: float
    ) -> None:
        dispatch = attempt.dispatch
        endpoint, model, prefix = dispatch.endpoint, dispatch.model, attempt.request_prefix
        number, project_id = attempt.number, attempt.project_id
        requests = [
            EngineRequest(
                endpoint,
                model,
                line.body,
                f"{prefix}{line.number:08x}{line.retries & 0xFFFF:04x}",
                number + line.retries,
                dispatch.batch_id,
                project_id,
            )
            for line in lines
            if line.body
        ]
        with failpoints.around("engine.submit"):
            taken = submitted(engine, requests)
        answers = iter(zip(requests, taken, strict=True))
        for line in lines:
            if not line.body:
                self._judge(attempt, line, f"{prefix}{line.number:08x}0000", UNREADABLE)
                continue
            request, answer = next(answers)
            if isinstance(answer, EngineResponse):
                self._judge(attempt, line, request.request_id, answer)
                continue
            future = asyncio.ensure_future(answer)
            running = Running(attempt, line, request.request_id, future, started)
            self._seating.enter(running)
            self._running[request.request_id] = running
            attempt.running[request.request_id] = running
            future.add_done_callback(partial(self._left_engine, self._life, running))
        _IN_FLIGHT.set(len(self._running))

    # --- answers ---------------------------------------------------------------------------------

    def _left_engine(
        self, life: int, running: Running, future: asyncio.Future[EngineResponse]
    ) -> None:
        error = None if future.cancelled() else future.exception()
        if life != self._life:
            return
        if isinstance(error, EngineDead):
            self.die(str(error) or "the engine died")
            return
        now = self._measure(1)
        attempt, line = running.attempt, running.line
        self._running.pop(running.request_id, None)
        self._seating.leave(running, now)
        attempt.running.pop(running.request_id, None)
        _IN_FLIGHT.set(len(self._running))
        if not running.discard and not attempt.closed:
            if error is None and not future.cancelled():
                response = future.result()
            else:
                response = failure(error)
            self._judge(attempt, line, running.request_id, response)
            self._attempts.changed()
        self._wake.set()

    def _judge(
        self, attempt: Attempt, line: Line, request_id: str, response: EngineResponse
    ) -> None:
        """Make an answer the line's result, or have the line run again later."""
        status = response.status
        flags = 0
        if not 200 <= status < 300:
            verdict = judge(
                response, counted=line.counted, retries=line.retries, chance=self._chance()
            )
            if isinstance(verdict, Again):
                self._run_later(attempt, line, verdict)
                return
            flags = FAILED_FLAG
        text = success_or_error_line(
            attempt.dispatch.batch_id,
            line.number,
            line.custom_id,
            status,
            response.body,
            request_id,
        )
        self._finish(attempt, line, text, flags, response.usage)

    def _finish(self, attempt: Attempt, line: Line, text: bytes, flags: int, usage: Usage) -> None:
        self.answered += 1
        self._attempts.finished(attempt, 1)
        self._reporter.add(attempt, line.number, text, flags, usage)
        if not attempt.left:
            self._reporter.send(attempt)

    def _run_later(self, attempt: Attempt, line: Line, verdict: Again) -> None:
        _RETRIES.inc()
        line.retries += 1
        line.counted += verdict.counted

        def again() -> None:
            attempt.waiting.discard(timer)
            if not attempt.closed:
                attempt.ready.appendleft(line)
                self._lineup.add(attempt)
                self._wake.set()

        # No seat is held meanwhile: the line is out of the engine.
        timer = asyncio.get_running_loop().call_later(verdict.seconds, again)
        attempt.waiting.add(timer)

    def _measure(self, finished: int) -> float:
        """Add the time since the last call to the time of work, if the engine had any."""
        now = self._clock.monotonic()
        if self._running:
            self._speed.note(now - self._measured_at, finished)
        self._measured_at = now
        return now

    async def _abort(self, request_ids: list[str]) -> None:
        if not request_ids or self._engine is None:
            return
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await self._engine.abort(request_ids)
        except TimeoutError:
            _log.error("engine_does_not_abort", lines=len(request_ids))
        except EngineDead as error:
            self.die(str(error) or "the engine died")
