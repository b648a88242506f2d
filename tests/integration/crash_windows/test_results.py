"""A store dies, or stands still, at each step between cutting a chunk and its last result."""

from pathlib import Path

import pytest

from protos.nightshift.v1 import work_pb2
from tests.integration.crash_windows import hands
from tests.integration.crash_windows.backings import migrated_database, postgres, shared
from tests.integration.crash_windows.stories import Stories
from tests.integration.crash_windows.world import Asker, Backing, Check, World
from tests.kit.store import our_errors
from tests.kit.template import Template, template

__all__ = ["migrated_database", "postgres", "shared", "template"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

stories = Stories()
LONG = (1,)


async def begun(world: World) -> str:
    """A batch that runs, in a store whose leases are short."""
    world.set(NIGHTSHIFT_STORE_LEASE_SECONDS="1")
    await world.start()
    await world.do(lambda asker: asker.register())
    return await hands.new_batch(world)


@stories.windows("leader.lead", "pool.report", "chunk.cut", "attempt.open")
async def hand_out(world: World) -> Check:
    """Chunks whose message is lost are found again."""
    batch_id = await begun(world)
    await world.arm()
    await world.do(hands.report_pools)
    await hands.work_off(world, batch_id)

    async def check() -> None:
        await hands.check_completed(world, batch_id)

    return check


@stories.windows("attempt.beat", "result.announce", "result.write", "result.record")
async def run(world: World) -> Check:
    """A result that is sent twice counts once."""
    batch_id = await begun(world)
    await world.arm()
    opened = await hands.open_chunk(world, batch_id)
    for _ in range(3):
        await world.do(lambda asker: asker.beat({opened.token: [(0, 2)]}))
    await hands.answer(world, batch_id, opened, long=LONG)
    await hands.work_off(world, batch_id, long=LONG)

    async def check() -> None:
        await hands.check_completed(world, batch_id, long=LONG)

    return check


@stories.windows("attempt.hand_back", "chunk.reclaim")
async def hand_back(world: World) -> Check:
    """A chunk handed back is handed out again, and by nobody's word twice at once."""
    batch_id = await begun(world)
    opened = await hands.open_chunk(world, batch_id)
    await world.arm()
    await world.do(lambda asker: asker.hand_back(opened.token))
    await hands.work_off(world, batch_id)

    async def check() -> None:
        await hands.check_completed(world, batch_id)

    return check


@stories.windows("executor.register", "executor.death")
async def death(world: World) -> Check:
    """An executor's lines are put apart once, however often it tells of its engine's death."""
    batch_id = await begun(world)
    opened = await hands.open_chunk(world, batch_id)
    await world.arm()
    await world.do(lambda asker: asker.died({opened.token: [(0, 2)]}))
    await world.do(lambda asker: asker.register(incarnation="i1"))
    await hands.work_off(world, batch_id, incarnation="i1")

    async def check() -> None:
        await hands.check_completed(world, batch_id)

    return check


@stories.windows("leader.resign")
async def resign(world: World) -> Check:
    """Who has resigned leads no more; the term of the next one is higher."""
    await world.start()
    await world.arm()
    first = await world.do(lambda asker: asker.lead("one"))

    async def leave(asker: Asker) -> None:
        request = work_pb2.ResignRequest(holder="one", term=first.term)
        with our_errors():
            await asker.work.Resign(request, metadata=asker.metadata)

    await world.do(leave)
    second = await world.do(lambda asker: asker.lead("two"))
    assert (second.leader, second.term) == (True, first.term + 1)

    async def check() -> None:
        again = await world.do(lambda asker: asker.lead("one"))
        assert (again.leader, again.current_holder) == (False, "two")

    return check


@pytest.mark.parametrize("name", stories.names())
async def test_killed(name: str, template: Template, tmp_path: Path) -> None:
    await stories.killed(name, template, tmp_path)


@pytest.mark.parametrize("name", stories.names())
async def test_frozen(name: str, template: Template, tmp_path: Path, shared: Backing) -> None:
    await stories.frozen(name, template, tmp_path, shared)
