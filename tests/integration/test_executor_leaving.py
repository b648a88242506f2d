"""An executor that is told to stop: all is handed back at once and in time, whatever hangs."""

import asyncio
import time
from collections.abc import Iterable

import pytest

from services.executor.engines.simulated.engine import SimulatedEngine
from services.executor.executor import LEAVING_SECONDS
from tests.kit.eventually import eventually
from tests.kit.executor_fleet import POOL, Fleet, fleet, lines
from tests.kit.scripted_store import chat_line

__all__ = ["fleet"]

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NOTICE_SECONDS = 1.5
"""What the lines in an engine get."""


async def test_what_has_not_started_goes_elsewhere_at_once_and_what_runs_may_finish(
    fleet: Fleet,
) -> None:
    running = fleet.work.add_chunk(
        [chat_line(f"runs-{n}", x_simulate={"delay_ms": 4_000}) for n in range(2)], pool_id=POOL
    )
    waiting = fleet.work.add_chunk(lines(3), pool_id=POOL, first=10)
    await fleet.publish(running, waiting)
    executor = await fleet.start(engine=SimulatedEngine(seats=2), drain_seconds=20.0)
    await eventually(lambda: executor.runner.in_flight == 2 and len(executor.attempts) == 2)
    await fleet.start(name="executor-1")
    began = time.monotonic()
    leaving = asyncio.create_task(fleet.stop())
    await eventually(lambda: fleet.work.chunks[waiting.chunk_id].done)
    assert not fleet.work.chunks[running.chunk_id].results
    await leaving
    # It did not wait for the end of its time, and nothing was run twice.
    assert time.monotonic() - began < 15
    assert fleet.work.chunks[running.chunk_id].done
    assert fleet.work.chunks[running.chunk_id].attempts == 1
    await fleet.settled()


async def test_who_is_leaving_begins_no_line(fleet: Fleet) -> None:
    texts = [chat_line(f"line-{n}", x_simulate={"delay_ms": 1_000}) for n in range(8)]
    dispatch = fleet.work.add_chunk(texts, pool_id=POOL)
    await fleet.publish(dispatch)
    executor = await fleet.start(engine=SimulatedEngine(seats=1), drain_seconds=20.0)
    await eventually(lambda: executor.runner.in_flight == 1)
    await fleet.stop()
    # What was in the engine, and what may have followed it before the word to stop was there.
    assert 1 <= len(fleet.work.chunks[dispatch.chunk_id].results) <= 2
    assert fleet.work.named("HandBack")


class StubbornEngine(SimulatedEngine):
    """A fake engine that neither lets lines go nor ends."""

    stubborn = True

    async def abort(self, request_ids: Iterable[str]) -> None:
        if self.stubborn:
            await asyncio.Event().wait()
        await super().abort(request_ids)

    async def close(self) -> None:
        if self.stubborn and self.in_flight:
            await asyncio.Event().wait()
        await super().close()


@pytest.mark.parametrize("away", ["engine", "engine and store"])
async def test_nothing_that_hangs_keeps_it_beyond_its_time(fleet: Fleet, away: str) -> None:
    texts = [chat_line("done"), chat_line("long", x_simulate={"delay_ms": 60_000}), *lines(2)]
    dispatch = fleet.work.add_chunk(texts, pool_id=POOL)
    await fleet.publish(dispatch)
    engine = StubbornEngine(seats=2)
    executor = await fleet.start(engine=engine, drain_seconds=NOTICE_SECONDS)
    await eventually(lambda: "done" in fleet.work.chunks[dispatch.chunk_id].answers())
    await eventually(lambda: executor.runner.in_flight == 1)
    fleet.work.away = away != "engine"
    began = time.monotonic()
    await fleet.stop()
    assert time.monotonic() - began < NOTICE_SECONDS + LEAVING_SECONDS + 4
    fleet.work.away = False
    # Another one takes its lines on at once: the broker had them back.
    await fleet.start(name="executor-1", engine=SimulatedEngine(seats=2))
    answers = fleet.work.chunks[dispatch.chunk_id].answers
    await eventually(lambda: len(answers()) == 3, within_seconds=4)
    assert fleet.work.named("ReportDeath") == []
    engine.stubborn = False
    await engine.close()
