"""A store dies, or stands still, while it makes what it needs; and work that ends its store."""

import asyncio
from pathlib import Path

import pytest

from protos.nightshift.v1 import batches_pb2
from tests.integration.crash_windows import hands
from tests.integration.crash_windows.backings import empty, postgres
from tests.integration.crash_windows.stories import Stories
from tests.integration.crash_windows.world import Backing, Check, World
from tests.kit.store import chat_line
from tests.kit.template import Template, template

__all__ = ["empty", "postgres", "template"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

stories = Stories()


@stories.windows("schema.statement", places=("before",))
@stories.windows("secret.make", "schema.migrate")
async def first_start(world: World) -> Check:
    """An empty directory becomes a store, whoever makes it."""
    await world.arm()
    await world.ready()
    secret = world.member.secret_file.read_text()
    batch_id = await hands.new_batch(world)

    async def check() -> None:
        assert world.member.secret_file.read_text() == secret
        assert await hands.left(world, batch_id) == 6

    return check


@pytest.mark.parametrize("name", stories.names())
async def test_killed(name: str, template: Template, tmp_path: Path) -> None:
    await stories.killed(name, template, tmp_path)


@pytest.mark.parametrize("name", stories.names())
async def test_frozen(name: str, template: Template, tmp_path: Path, empty: Backing) -> None:
    await stories.frozen(name, template, tmp_path, empty)


# --- what ends every store that touches it --------------------------------------------------------


async def test_end_files_that_end_their_store_take_no_other_batch_with_them(
    template: Template, tmp_path: Path
) -> None:
    # Only a batch with both files announces a second part.
    world = World(template, tmp_path, action="kill", places=("finalize.announce:before",))
    world.constants["services.store.domain.retry_budget._LONGEST_MS"] = 600_000
    try:
        await world.start()
        poison = await hands.new_batch(world)
        others = [await hands.new_batch(world, lines=3) for _ in range(6)]
        attempts = {each: await hands.open_chunk(world, each) for each in (poison, *others)}
        await world.arm_for_good()
        for batch_id, opened in attempts.items():
            await hands.answer(world, batch_id, opened)

        async def all_done() -> bool:
            done = [await hands.status_is(world, one, hands.COMPLETED) for one in others]
            return all(done)

        await world.until(all_done)
        finalizing = batches_pb2.BATCH_STATUS_FINALIZING
        assert await hands.status_is(world, poison, finalizing)
        batch = await world.do(lambda asker: asker.get(poison))
        assert "writing its end files was begun" in batch.nightshift.reason
        # It is left alone for longer and longer, in which the store is there for everybody.
        await world.until(lambda: world.sql_one("SELECT tries FROM batches ORDER BY seq") >= 4)
        deaths = world.starts
        more = [await hands.new_batch(world, lines=1) for _ in range(2)]
        for batch_id in more:
            await hands.work_off(world, batch_id)
        assert world.starts <= deaths + 1
    finally:
        await world.close()


async def test_inputs_that_end_their_store_fail_and_hold_up_nobody(
    template: Template, tmp_path: Path
) -> None:
    # Only a faulty input comes there.
    world = World(template, tmp_path, action="kill", places=("batch.fail:before",))
    world.constants["services.store.domain.retry_budget._LONGEST_MS"] = 1_000
    try:
        await world.start()
        faulty = await world.created(lambda asker: asker.upload(chat_line("same") * 2))
        sound = await world.created(lambda asker: asker.upload(chat_line("r0")))
        await world.arm_for_good()
        poison = await world.created(lambda asker: asker.create(faulty.id))
        others = await asyncio.gather(
            *(world.created(lambda asker: asker.create(sound.id)) for _ in range(6))
        )
        running = batches_pb2.BATCH_STATUS_IN_PROGRESS
        for other in others:
            await world.until(lambda other=other: hands.status_is(world, other.id, running))  # type: ignore[misc]  # bound now
        failed = batches_pb2.BATCH_STATUS_FAILED
        await world.until(lambda: hands.status_is(world, poison.id, failed))
        batch = await world.do(lambda asker: asker.get(poison.id))
        assert [error.code for error in batch.errors] == ["server_error"]
    finally:
        await world.close()
