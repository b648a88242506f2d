"""How lines enter the engine, and what an engine said before it died."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from protos.nightshift.v1 import dispatch_pb2
from services.executor.attempts import Attempt, Attempts
from services.executor.engines.base import Engine, EngineDead, EngineRequest, EngineResponse
from services.executor.input_lines import Line
from services.executor.lines.engine_death import Death
from services.executor.lines.reporter import Reporter
from services.executor.lines.runner import Runner
from services.executor.lines.seating import Seating
from services.kit.messages.bus import Delivery
from services.kit.process.clock import ManualClock
from services.kit.wire.endpoints import CHAT_COMPLETIONS
from tests.kit.eventually import eventually

pytestmark = pytest.mark.unit

LINES = 3


class ScriptedEngine:
    """Answers each line when the test says so."""

    seats = 8

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[EngineResponse]] = []

    def submit_many(
        self, requests: Sequence[EngineRequest]
    ) -> list[asyncio.Future[EngineResponse]]:
        made = [asyncio.get_running_loop().create_future() for _ in requests]
        self.calls += made
        return list(made)


class NotingReporter:
    """Notes the lines that have a result."""

    full = False

    def __init__(self) -> None:
        self.lines: list[int] = []

    def add(self, _attempt: Attempt, line: int, *_rest: Any) -> None:
        self.lines.append(line)

    def send(self, _attempt: Attempt) -> None:
        raise AssertionError("lines are left")


@asynccontextmanager
async def feeding(runner: Runner) -> AsyncIterator[None]:
    task = asyncio.create_task(runner.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def runner_of(
    attempts: Attempts, reporter: NotingReporter, clock: ManualClock, deaths: list[Death]
) -> Runner:
    return Runner(
        attempts=attempts,
        reporter=cast(Reporter, reporter),
        clock=clock,
        chance=lambda: 0.0,
        line_timeout_seconds=60.0,
        on_death=deaths.append,
        on_alone=lambda: None,
    )


async def test_a_line_takes_as_many_seats_as_it_has_sequences() -> None:
    clock, attempts = ManualClock(), Attempts()
    reporter, engine = NotingReporter(), ScriptedEngine()
    runner = runner_of(attempts, reporter, clock, [])
    # The last is a line of more sequences than there are seats, and runs alone.
    bodies = [b'{"n":3}', b'{"n":4}', b'{"n":2}', b"{}", b'{"n":128}', b"{}"]
    dispatch = dispatch_pb2.Dispatch(
        endpoint=CHAT_COMPLETIONS, line_count=len(bodies) + 1, input_bytes=1
    )
    attempt = attempts.add(Delivery(cast(Any, None), dispatch, 1), clock.monotonic())

    async def in_engine(count: int) -> None:
        await eventually(lambda: runner.in_flight == count)
        # Whatever else could go in would do so now.
        runner.wake()
        for _ in range(3):
            await asyncio.sleep(0)
        assert runner.in_flight == count

    async with feeding(runner):
        runner.use(cast(Engine, engine))
        runner.add(attempt, [Line(number, b'"r"', body) for number, body in enumerate(bodies)])
        await in_engine(2)
        # One seat is left, and nothing overtakes the line that needs two.
        engine.calls[0].set_result(EngineResponse(200, b"{}"))
        await in_engine(3)
        for call in engine.calls[1:3]:
            call.set_result(EngineResponse(200, b"{}"))
        await in_engine(1)
        engine.calls[3].set_result(EngineResponse(200, b"{}"))
        await eventually(lambda: len(engine.calls) == 5)
        await in_engine(1)
        engine.calls[4].set_result(EngineResponse(200, b"{}"))
        await eventually(lambda: len(engine.calls) == 6)
        engine.calls[5].set_result(EngineResponse(200, b"{}"))
        await eventually(lambda: reporter.lines == [0, 1, 2, 3, 4, 5])


def test_large_lines_go_in_a_few_at_a_time() -> None:
    seating = Seating(8, 0)
    ready = deque(Line(number, b'"r"', b"x" * 100_000) for number in range(7))
    assert [len(seating.slice_of(ready)) for _ in range(4)] == [3, 3, 1, 0]


async def test_a_line_that_was_answered_before_the_engine_died_is_no_suspect() -> None:
    clock, attempts, deaths = ManualClock(), Attempts(), list[Death]()
    reporter, engine = NotingReporter(), ScriptedEngine()
    runner = runner_of(attempts, reporter, clock, deaths)
    dispatch = dispatch_pb2.Dispatch(line_count=LINES, input_bytes=LINES)
    attempt = attempts.add(Delivery(cast(Any, None), dispatch, 1), clock.monotonic())
    async with feeding(runner):
        runner.use(cast(Engine, engine))
        runner.add(attempt, [Line(number, b'"r"', b"{}") for number in range(LINES)])
        await eventually(lambda: runner.in_flight == LINES)
        first, second, third = engine.calls
        # Told in one turn of the loop: the death is heard before the answer is.
        first.set_exception(EngineDead("out of memory"))
        second.set_result(EngineResponse(200, b"{}"))
        (death,) = await eventually(lambda: deaths)
        third.cancel()
    assert death == Death(reason="out of memory", casualties={attempt: [0, 2]}, complete=True)
    assert reporter.lines == [1]
    assert runner.in_flight == 0
