"""A store dies, or stands still, at each step that follows on stored content that is missing."""

import contextlib
from pathlib import Path

import pytest

from services.kit.wire.errors import ConflictError, LostError
from tests.integration.crash_windows import hands
from tests.integration.crash_windows.backings import migrated_database, postgres, shared
from tests.integration.crash_windows.stories import Stories
from tests.integration.crash_windows.world import Backing, Check, World
from tests.integration.store_work.worker import ranges_of
from tests.kit.template import Template, template

__all__ = ["migrated_database", "postgres", "shared", "template"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

stories = Stories()


async def begun(world: World) -> str:
    """A batch that runs, in a store whose leases and waits are short."""
    world.constants["services.store.domain.retry_budget._FAULT_MS"] = 200
    world.set(NIGHTSHIFT_STORE_LEASE_SECONDS="1")
    await world.start()
    await world.do(lambda asker: asker.register())
    return await hands.new_batch(world)


def blob(world: World, kind: str) -> Path:
    """The only blob of a kind."""
    (found,) = [path for path in world.blobs() if path.parent.name == kind]
    return found


@stories.windows("index.write_again", "index.replace")
async def index(world: World) -> Check:
    """A lost line index is made again, and named once."""
    batch_id = await begun(world)
    await world.arm(blob(world, "index").unlink)
    await hands.work_off(world, batch_id)

    async def check() -> None:
        await hands.check_completed(world, batch_id)

    return check


@stories.windows("batch.put_off", "batch.found_again")
async def content(world: World) -> Check:
    """A batch waits for its input, and goes on once that is back."""
    batch_id = await begun(world)
    place = blob(world, "file")
    kept = place.read_bytes()
    await world.arm(place.unlink)

    async def waits() -> bool:
        batch = await world.do(lambda asker: asker.get(batch_id))
        if batch.nightshift.reason.startswith("the content of its input file"):
            return True
        opened = await hands.open_chunk(world, batch_id)
        with contextlib.suppress(LostError, ConflictError):
            await world.do(lambda asker: asker.lines(opened.token, ranges_of(opened.lines)))
        return False

    await world.until(waits)
    place.write_bytes(kept)
    await hands.work_off(world, batch_id)

    async def check() -> None:
        await hands.check_completed(world, batch_id)
        assert not (await world.do(lambda asker: asker.get(batch_id))).nightshift.reason

    return check


@pytest.mark.parametrize("name", stories.names())
async def test_killed(name: str, template: Template, tmp_path: Path) -> None:
    await stories.killed(name, template, tmp_path)


@pytest.mark.parametrize("name", stories.names())
async def test_frozen(name: str, template: Template, tmp_path: Path, shared: Backing) -> None:
    await stories.frozen(name, template, tmp_path, shared)
