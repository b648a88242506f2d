"""An executor dies, or stands still, at each step between a message and the store's word on it."""

from pathlib import Path

import pytest

from tests.integration.crash_windows.fleet import Fleet, Stories
from tests.kit.template import Template, template

__all__ = ["template"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

stories = Stories("executor")


@stories.windows("store.register", "beat.put", "room.say", "message.ask", "store.open")
async def begin(fleet: Fleet) -> None:
    """Lines of an executor that is lost before it has any run elsewhere."""
    await work(fleet)


@stories.windows("engine.submit", "results.send", "results.acknowledged", "message.ack")
async def run(fleet: Fleet) -> None:
    """What an executor had sent before it was lost counts once; the rest runs elsewhere."""
    await work(fleet)


async def work(fleet: Fleet) -> None:
    """Run batches until processes have died or stopped at all places."""
    await fleet.open()
    fleet.begin()
    await fleet.completed(await fleet.batch(80))
    while not fleet.reached:
        await fleet.completed(await fleet.batch(4))


@stories.windows("store.beat", "message.keep")
async def slow_work(fleet: Fleet) -> None:
    """The same while lines run for longer than a beat."""
    await fleet.open()
    fleet.begin()
    while not fleet.reached:
        await fleet.completed(await fleet.batch(4, delay_ms=1_500))


@stories.windows("store.report_death")
async def death(fleet: Fleet) -> None:
    """A line that ends its engine is put apart, whether or not its executor lives to tell."""
    await fleet.open()
    fleet.begin()
    while not fleet.reached:
        await fleet.completed(await fleet.batch(8, first={"crash": 2}, delay_ms=50))


@stories.windows("store.hand_back", "message.give_back", "beat.forget")
async def leaving(fleet: Fleet) -> None:
    """What is told to stop hands back what it holds; what it could not is found again."""
    await fleet.open()
    fleet.begin()
    batch_id = await fleet.batch(4, delay_ms=5_000)
    while not fleet.reached:
        await fleet.until(fleet.holds_work)
        await fleet.tell_to_stop()
    await fleet.completed(batch_id)


@pytest.mark.parametrize("name", stories.names())
async def test_killed(name: str, template: Template, tmp_path: Path) -> None:
    await stories.killed(name, template, tmp_path)


@pytest.mark.parametrize("name", stories.names())
async def test_frozen(name: str, template: Template, tmp_path: Path) -> None:
    await stories.frozen(name, template, tmp_path)
