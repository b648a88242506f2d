"""The scheduler tells the store of its pools: at once what changed, the rest now and then."""

import time

import pytest

from protos.nightshift.v1 import dispatch_pb2, work_pb2
from services.scheduler import pool_reports
from tests.kit.eventually import eventually
from tests.kit.scheduler_world import OTHER, POOL, World, world
from tests.kit.scripted_puller import ScriptedPuller

__all__ = ["world"]

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def said(world: World) -> list[dict[str, work_pb2.PoolReport]]:
    """Every report, by pool."""
    return [
        {each.pool_id: each for each in request.pools}
        for method, request in world.work.calls
        if method == "ReportPools"
    ]


async def test_executors_that_come_and_go_are_told_at_once(world: World) -> None:
    await world.scheduler("a")
    await eventually(lambda: said(world) and said(world)[-1].keys() == {POOL, OTHER})
    assert {each.executors_alive for each in said(world)[-1].values()} == {0}
    async with ScriptedPuller(world.bus, POOL):
        await eventually(lambda: said(world)[-1][POOL].executors_ready == 1)
        told = said(world)[-1]
        assert (told[POOL].executors_alive, told[POOL].seats) == (1, 64)
        assert told[OTHER].executors_alive == 0
        # Without news nothing is said again for a while.
        count, reclaims = len(said(world)), world.work.called("ReclaimChunks")
        await eventually(lambda: world.work.called("ReclaimChunks") >= reclaims + 2)
        assert len(said(world)) == count
    await eventually(lambda: said(world)[-1][POOL].executors_alive == 0)


async def test_why_an_engine_does_not_start_is_told_until_it_does(world: World) -> None:
    await world.scheduler("a")
    beat = dispatch_pb2.ExecutorBeat(
        executor_id="e",
        pool_id=POOL,
        engine_state=dispatch_pb2.ENGINE_STATE_DEAD,
        trouble="no such folder: /models/m",
    )

    async def told(trouble: str) -> bool:
        beat.at_ms = int(time.time() * 1000)
        await world.bus.say_room(beat)
        return bool(said(world)) and said(world)[-1][POOL].trouble == trouble

    await eventually(lambda: told("no such folder: /models/m"), every_seconds=0.2)
    assert said(world)[-1][POOL].executors_ready == 0
    beat.engine_state, beat.trouble = dispatch_pb2.ENGINE_STATE_READY, ""
    await eventually(lambda: told(""), every_seconds=0.2)
    assert said(world)[-1][POOL].executors_ready == 1


async def test_the_same_is_said_again_so_that_it_is_believed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_reports, "REPEAT_SECONDS", 0.5)
    await world.scheduler("a")
    await eventually(lambda: len(said(world)) >= 3)
