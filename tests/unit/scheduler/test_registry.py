"""Who is alive."""

from typing import Any

import pytest

from protos.nightshift.v1 import dispatch_pb2
from services.kit.process.clock import ManualClock
from services.kit.wire.ids import PoolId
from services.scheduler.leader import Leader
from services.scheduler.reconciler import Reconciler
from services.scheduler.registry import SILENT_SECONDS, Registry

pytestmark = pytest.mark.unit

POOL = PoolId("a-1")


def beat(at_ms: int, *, held: int = 0) -> dispatch_pb2.ExecutorBeat:
    return dispatch_pb2.ExecutorBeat(
        executor_id="executor-0",
        pool_id=POOL,
        at_ms=at_ms,
        held_lines=held,
        engine_state=dispatch_pb2.ENGINE_STATE_READY,
    )


def held(registry: Registry) -> list[int]:
    return [word.held_lines for word in registry.alive().get(POOL, [])]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000.0)


def test_who_falls_silent_is_dead(clock: ManualClock) -> None:
    registry = Registry(clock)
    registry.hear(beat(1_000_000))
    clock.advance(SILENT_SECONDS - 0.1)
    assert held(registry) == [0]
    clock.advance(0.1)
    assert held(registry) == []


def test_a_beat_that_does_not_change_is_no_sign_of_life(clock: ManualClock) -> None:
    registry = Registry(clock)
    for _ in range(int(SILENT_SECONDS)):
        registry.read([beat(1_000_000)])
        clock.advance(1)
    assert held(registry) == []


def test_a_dead_executors_last_beat_does_not_make_it_live(clock: ManualClock) -> None:
    registry = Registry(clock)
    registry.read([beat(990_000)])
    assert held(registry) == []


def test_an_executor_whose_clock_is_off_lives_by_its_next_beat(clock: ManualClock) -> None:
    registry = Registry(clock)
    registry.read([beat(1)])
    registry.read([beat(1_001)])
    assert held(registry) == [0]


def test_a_later_word_is_not_undone_by_an_earlier_beat(clock: ManualClock) -> None:
    registry = Registry(clock)
    registry.hear(beat(1_000_500, held=7))
    registry.read([beat(1_000_000, held=3)])
    assert held(registry) == [7]
    registry.hear(beat(1_000_400, held=4))
    assert held(registry) == [7]


def test_a_restarted_executor_whose_clock_went_back_is_believed_once_it_was_silent(
    clock: ManualClock,
) -> None:
    registry = Registry(clock)
    registry.hear(beat(1_000_000, held=7))
    clock.advance(SILENT_SECONDS)
    registry.hear(beat(900_000, held=1))
    assert held(registry) == [1]


def test_who_was_silent_for_long_is_forgotten(clock: ManualClock) -> None:
    registry = Registry(clock)
    registry.hear(beat(1_000_000))
    clock.advance(200)
    registry.sweep()
    assert registry._known == {}


async def test_a_standby_forgets_who_fell_silent_too(clock: ManualClock) -> None:
    """It hears all executors that there ever are, and may stand by for months."""
    registry = Registry(clock)
    # Nothing else is asked of one that does not lead.
    nobody: Any = None
    standby = Reconciler(
        bus=nobody,
        client=nobody,
        leader=Leader(nobody, holder="standby", clock=clock),
        registry=registry,
        queues=nobody,
        reporter=nobody,
    )
    registry.hear(beat(1_000_000))
    await standby.run_once()
    assert registry._known
    clock.advance(120)
    await standby.run_once()
    assert not registry._known
