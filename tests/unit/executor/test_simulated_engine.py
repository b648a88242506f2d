"""Seats, queue and faults of the simulated engine."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.executor.engines.base import (
    EngineDead,
    EngineRequest,
    EngineResponse,
    RequestAborted,
)
from services.executor.engines.simulated.engine import SimulatedEngine
from services.executor.engines.simulated.started_log import StartedFile
from services.kit.wire.endpoints import CHAT_COMPLETIONS
from tests.kit.eventually import eventually
from tests.kit.started_lines import executions, read_started

pytestmark = pytest.mark.unit


class SteppedClock:
    """Stands in for time."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    engine = SimulatedEngine(seats=2)
    await engine.start()
    yield engine
    await engine.close()


def line(name: int, *, attempt: int = 1, **faults: Any) -> EngineRequest:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": str(name)}]}
    if faults:
        body["x_simulate"] = faults
    return EngineRequest(CHAT_COMPLETIONS, "m", orjson.dumps(body), f"{name:032x}", attempt)


async def test_plain_lines_are_answered_on_the_spot(engine: SimulatedEngine) -> None:
    answers = engine.submit_many([line(name) for name in range(500)])
    assert all(isinstance(answer, EngineResponse) for answer in answers)
    assert engine.in_flight == 0


async def test_lines_wait_for_a_seat_in_order(engine: SimulatedEngine) -> None:
    finished: list[int] = []
    tasks = []
    for name in range(8):
        future = engine.submit(line(name, delay_ms=5 if name % 2 else 1))
        future.add_done_callback(lambda _, name=name: finished.append(name))
        tasks.append(future)
    plain = engine.submit(line(99))
    assert engine.in_flight == 9
    assert not plain.done()  # a plain line does not overtake
    await asyncio.gather(*tasks, plain)
    # Two seats: never more than one place from its turn.
    assert all(abs(place - name) <= 2 for place, name in enumerate(finished)), finished


async def test_seats_bound_what_runs_at_once() -> None:
    engine = SimulatedEngine(seats=4)
    await engine.start()
    futures = [engine.submit(line(name, delay_ms=20)) for name in range(12)]
    loop = asyncio.get_running_loop()
    started = loop.time()
    await asyncio.gather(*futures)
    assert loop.time() - started >= 0.055  # three rounds of 20 ms, timers may be 1 ms early


async def test_an_abort_frees_the_seat_for_the_next(engine: SimulatedEngine) -> None:
    hanging = [engine.submit(line(name, hang=True)) for name in (1, 2)]
    waiting = engine.submit(line(3))
    await engine.abort([f"{1:032x}"])
    assert (await waiting).status == 200
    with pytest.raises(RequestAborted):
        await hanging[0]
    assert engine.in_flight == 1


async def test_a_crash_ends_all_queued_ones_too(engine: SimulatedEngine) -> None:
    futures = [
        engine.submit(line(1, hang=True)),
        engine.submit(line(2, delay_ms=1, crash=True)),
        engine.submit(line(3)),
        engine.submit(line(4, hang=True)),
    ]
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {EngineDead}
    assert engine.in_flight == 0


@pytest.mark.parametrize(("crash", "attempt", "dies"), [(2, 1, 1), (2, 2, 1), (2, 3, 0), (0, 1, 0)])
async def test_a_crash_may_end_with_an_attempt(
    engine: SimulatedEngine, crash: int, attempt: int, dies: int
) -> None:
    answers = engine.submit_many([line(1), line(2, attempt=attempt, crash=crash), line(3)])
    outcomes = await asyncio.gather(
        *[answer for answer in answers if not isinstance(answer, EngineResponse)],
        return_exceptions=True,
    )
    assert isinstance(answers[0], EngineResponse)
    assert [type(outcome) for outcome in outcomes] == [EngineDead, EngineDead] * dies


async def test_a_hanging_engine_steps_no_more_but_looks_healthy() -> None:
    clock = SteppedClock()
    engine = SimulatedEngine(seats=4, clock=clock)
    await engine.start()
    delayed = engine.submit(line(1, delay_ms=1))
    hang = engine.submit(line(2, hang="engine"))
    late = engine.submit(line(3))
    clock.now += 61
    assert engine.stalled_seconds() == 61
    assert engine.last_step_at == 100
    engine.check_health()
    await asyncio.sleep(0.02)  # the delay passes, and nothing comes of it
    assert not any(future.done() for future in (delayed, hang, late))
    assert engine.in_flight == 3
    await engine.abort([f"{name:032x}" for name in (1, 2, 3)])
    assert engine.stalled_seconds() == 0
    await engine.start()
    assert (await engine.submit(line(4))).status == 200


async def test_a_hanging_line_stalls_only_itself(engine: SimulatedEngine) -> None:
    engine.submit(line(1, hang=True))
    assert engine.stalled_seconds() == 0
    assert (await engine.submit(line(2))).status == 200
    await engine.abort([f"{1:032x}"])


async def test_a_cancelled_awaitable_gives_its_seat_back(engine: SimulatedEngine) -> None:
    hanging = [engine.submit(line(name, hang=True)) for name in (1, 2)]
    waiting = engine.submit(line(3))
    hanging[0].cancel()
    assert (await waiting).status == 200
    await eventually(lambda: engine.in_flight == 1)


async def test_an_id_is_in_flight_once(engine: SimulatedEngine) -> None:
    engine.submit(line(1, hang=True))
    with pytest.raises(ValueError, match="in flight"):
        engine.submit(line(1, hang=True))


async def test_status_comes_after_the_delay_and_for_some_attempts(engine: SimulatedEngine) -> None:
    first = await engine.submit(line(1, delay_ms=1, status=500, times=1))
    second = await engine.submit(line(1, attempt=2, delay_ms=1, status=500, times=1))
    assert (first.status, second.status) == (500, 200)


def test_revision_is_that_of_the_configuration() -> None:
    assert SimulatedEngine().revision == SimulatedEngine(seats=64).revision
    assert SimulatedEngine().revision != SimulatedEngine(seats=65).revision


async def test_what_starts_is_noted_when_it_gets_a_seat(tmp_path: Path) -> None:
    engine = SimulatedEngine(seats=2, started=StartedFile(tmp_path, "executor-0.ab"))
    await engine.start()
    engine.submit_many([line(0x1_0000)])
    engine.submit_many([line(name << 16, delay_ms=60_000) for name in range(2, 5)])
    assert [each.line for each in read_started(tmp_path)] == [1, 2, 3]
    await engine.abort([f"{2 << 16:032x}"])
    engine.submit_many([line(0x5_0001, attempt=3)])
    await engine.close()
    found = read_started(tmp_path)
    assert [each.line for each in found] == [1, 2, 3, 4]
    assert {(each.executor, each.incarnation) for each in found} == {("executor-0", "ab")}
    # Started again by another process, with an answer that the executor asks for once more.
    again = SimulatedEngine(seats=2, started=StartedFile(tmp_path, "executor-0.cd"))
    await again.start()
    again.submit_many([line(0x1_0000, attempt=2), line(0x1_0001, attempt=3)])
    await again.close()
    assert executions(read_started(tmp_path))["-", 1] == 2
