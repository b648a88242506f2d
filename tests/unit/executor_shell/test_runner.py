"""What an engine said before it died counts, though it was heard only afterwards."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from protos.nightshift.v1 import dispatch_pb2
from services.executor.attempts import Attempt, Attempts
from services.executor.deaths import Death
from services.executor.engines.base import Engine, EngineDead, EngineRequest, EngineResponse
from services.executor.envelope import Line
from services.executor.reporter import Reporter
from services.executor.runner import Runner
from services.kit.bus import Delivery
from services.kit.clock import ManualClock
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


async def test_a_line_that_was_answered_before_the_engine_died_is_no_suspect() -> None:
    clock, attempts, deaths = ManualClock(), Attempts(), list[Death]()
    reporter, engine = NotingReporter(), ScriptedEngine()
    runner = Runner(
        attempts=attempts,
        reporter=cast(Reporter, reporter),
        clock=clock,
        chance=lambda: 0.0,
        line_timeout_seconds=60.0,
        on_death=deaths.append,
        on_alone=lambda: None,
    )
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
