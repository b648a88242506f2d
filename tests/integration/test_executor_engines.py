"""The engine of an executor: what is said when there is none, and what its death tells."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
import structlog

from protos.nightshift.v1 import dispatch_pb2, work_pb2
from services.executor import executor as executors
from services.executor.engines.base import Answer, EngineDead, EngineRequest, EngineStartError
from services.executor.engines.simulated.engine import SimulatedEngine
from services.kit.messages.subjects import event_subject
from tests.kit.eventually import eventually
from tests.kit.executor_fleet import POOL, Fleet, fleet, lines
from tests.kit.scripted_store import PROJECT, chat_line

__all__ = ["fleet"]

pytestmark = [pytest.mark.integration, pytest.mark.slow]

DEAD = dispatch_pb2.ENGINE_STATE_DEAD
READY = dispatch_pb2.ENGINE_STATE_READY
STARTING = dispatch_pb2.ENGINE_STATE_STARTING

RARE_BEATS_SECONDS = 6.0
"""For what must not wait for a beat, on a machine that may be busy."""


class UnwillingEngine(SimulatedEngine):
    """A fake engine that does not start while something is missing."""

    missing: Exception | None = None
    starts: list[float]

    async def start(self) -> None:
        self.starts.append(time.monotonic())
        # What it costs, long enough to be told apart from the failure.
        await asyncio.sleep(0.1)
        if self.missing is not None:
            raise self.missing
        await super().start()

    @property
    def waits(self) -> list[float]:
        """Seconds between one start and the next."""
        return [later - one for one, later in pairwise(self.starts)]


class NotingEngine(SimulatedEngine):
    """A fake engine that notes what it was asked."""

    requests: list[EngineRequest]

    def submit_many(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        self.requests += requests
        return super().submit_many(requests)


async def test_lines_come_to_the_engine_with_their_project(fleet: Fleet) -> None:
    engine = NotingEngine()
    engine.requests = []
    dispatch = fleet.work.add_chunk(lines(3), pool_id=POOL)
    await fleet.publish(dispatch)
    await fleet.start(engine=engine)
    await fleet.settled()
    assert {request.project_id for request in engine.requests} == {PROJECT}


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (EngineStartError("no such folder:\n/models/m"), "no such folder: /models/m"),
        (MemoryError("out of memory"), "MemoryError: out of memory"),
    ],
)
async def test_an_engine_that_does_not_start_is_told_of_and_takes_no_work(
    fleet: Fleet, missing: Exception, said: str
) -> None:
    engine = UnwillingEngine()
    engine.missing, engine.starts = missing, []
    dispatch = fleet.work.add_chunk(lines(2), pool_id=POOL)
    await fleet.publish(dispatch)
    executor = await fleet.start(engine=engine)
    await eventually(lambda: len(engine.starts) >= 4)
    # Ever more slowly: a busy machine may only make a wait longer.
    for wait, at_least in zip(engine.waits, [0.25, 0.5, 1.0], strict=False):
        assert wait >= at_least
    told = [beat for beat in fleet.rooms if beat.trouble]
    assert {beat.trouble for beat in told} == {said}
    # It stays told while the engine is tried again.
    assert {beat.engine_state for beat in told} == {DEAD, STARTING}
    assert all(beat.seats == beat.low_water == beat.high_water == 0 for beat in told)

    async def kept() -> bool:
        return [beat.trouble for beat in await fleet.bus.beats()] == [said]

    await eventually(kept)
    assert len(executor.attempts) == 0
    assert fleet.work.named("OpenAttempt") == []
    assert set(fleet.said_ready) == {False}
    engine.missing = None
    await eventually(lambda: fleet.work.chunks[dispatch.chunk_id].done)
    assert fleet.said_ready[-1]
    assert (fleet.rooms[-1].engine_state, fleet.rooms[-1].trouble) == (READY, "")
    await fleet.settled()


async def test_an_engine_that_takes_work_is_told_of_in_the_log(fleet: Fleet) -> None:
    with structlog.testing.capture_logs() as logs:
        await fleet.start(engine=SimulatedEngine(seats=3))
        [told] = await eventually(lambda: [one for one in logs if one["event"] == "engine_ready"])
    assert (told["engine"], told["seats"]) == ("simulated", 3)


async def test_an_engine_that_dies_again_and_again_waits_longer_each_time(fleet: Fleet) -> None:
    engine = UnwillingEngine()
    engine.starts = []
    for first in range(7):
        texts = [chat_line("kills", x_simulate={"crash": True})]
        await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL, first=first, alone=True))
    await fleet.start(engine=engine)
    await eventually(lambda: len(engine.starts) == 8, within_seconds=20)
    # From 0.025 s, twice as long each time, up to a second.
    assert engine.waits[-2] >= 0.8
    assert engine.waits[-1] >= 1.0
    # A line that is answered shows that the engine works.
    good = fleet.work.add_chunk(lines(1), pool_id=POOL, first=20)
    await fleet.publish(good)
    await eventually(lambda: fleet.work.chunks[good.chunk_id].done)
    texts = [chat_line("kills", x_simulate={"crash": True})]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL, first=30))
    died = time.monotonic()
    await eventually(lambda: len(engine.starts) == 9, within_seconds=20)
    assert engine.starts[-1] - died < 2


async def test_that_suspects_are_in_the_engine_is_told_at_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may end this process before the next beat is due."""
    monkeypatch.setattr(executors, "BEAT_SECONDS", RARE_BEATS_SECONDS)
    alone = [chat_line("suspect", x_simulate={"delay_ms": 60_000})]
    executor = await fleet.start()
    await eventually(lambda: executor.presence.ready)
    for first in range(3):
        beats = len(fleet.work.named("Beat"))
        dispatch = fleet.work.add_chunk(alone, pool_id=POOL, first=first, alone=True)
        await fleet.publish(dispatch)
        await eventually(lambda: executor.runner.in_flight == 1, every_seconds=0.001)
        began = time.monotonic()
        marked = await eventually(
            lambda seen=beats: [
                each
                for each in fleet.work.named("Beat")[seen:]
                if any(one.started for one in each.attempts)
            ],
            every_seconds=0.001,
        )
        assert time.monotonic() - began < RARE_BEATS_SECONDS / 2
        [attempt] = marked[0].attempts
        fleet.work.drops[attempt.token] = work_pb2.DROP_REASON_CANCELLED
        await eventually(lambda: executor.runner.in_flight == 0)


class LostEngine(SimulatedEngine):
    """A fake engine whose process is gone, which no call in flight is told."""

    gone = False

    async def start(self) -> None:
        self.gone = False
        await super().start()

    def check_health(self) -> None:
        if self.gone:
            raise EngineDead("its process is gone")
        super().check_health()


async def test_a_death_that_no_call_tells_of_is_noticed(fleet: Fleet) -> None:
    engine = LostEngine()
    stuck = [chat_line("stuck", x_simulate={"delay_ms": 60_000})]
    dispatch = fleet.work.add_chunk(stuck, pool_id=POOL)
    await fleet.publish(dispatch)
    executor = await fleet.start(engine=engine)
    await eventually(lambda: executor.runner.in_flight == 1)
    engine.gone = True
    [report] = await eventually(lambda: fleet.work.named("ReportDeath"))
    assert [part.count for part in report.attempts[0].started] == [1]
    # And it is started again, with nothing in it.
    await eventually(lambda: executor.presence.ready)
    assert not engine.gone


class KeepingEngine(SimulatedEngine):
    """A fake engine that is slow to let aborted lines go."""

    async def abort(self, request_ids: Iterable[str]) -> None:
        await asyncio.sleep(0.5)
        await super().abort(request_ids)


async def test_a_line_that_died_alone_is_told_from_one_that_had_company(fleet: Fleet) -> None:
    kills = [chat_line("kills", x_simulate={"delay_ms": 400, "crash": True})]
    await fleet.publish(fleet.work.add_chunk(kills, pool_id=POOL))
    executor = await fleet.start(engine=KeepingEngine())
    await eventually(lambda: len(fleet.work.named("ReportDeath")) == 1)
    await eventually(lambda: executor.presence.ready)
    stuck = fleet.work.add_chunk(
        [chat_line("stuck", x_simulate={"hang": True})], pool_id=POOL, first=1, batch_id="batch_b"
    )
    await fleet.publish(stuck, fleet.work.add_chunk(kills, pool_id=POOL, first=2))
    await eventually(lambda: executor.runner.in_flight == 2)
    # What is being aborted while the engine dies may be to blame, though no longer of interest.
    event = dispatch_pb2.Event(
        kind=dispatch_pb2.EVENT_KIND_BATCH_CANCELLING, batch_id="batch_b", pool_id=POOL
    )
    [token] = [token for token in fleet.work.tokens if token.startswith(stuck.chunk_id)]
    fleet.work.drops[token] = work_pb2.DROP_REASON_CANCELLED
    await fleet.bus.publish_event(event_subject(event), event.SerializeToString(), "outbox-1")
    await eventually(lambda: len(fleet.work.named("ReportDeath")) == 2)
    first, second = fleet.work.named("ReportDeath")
    for report in (first, second):
        [suspect] = report.attempts
        assert [part.count for part in suspect.started] == [1]
    assert (first.complete, second.complete) == (True, False)
