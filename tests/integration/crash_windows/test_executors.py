"""An executor dies, or stands still, at each step between a message and the store's word on it."""

import signal
from pathlib import Path

import pytest

from tests.integration.crash_windows.fleet import Fleet, Stories
from tests.kit.template import Template, template

__all__ = ["template"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(180)]

stories = Stories("executor")


@stories.windows(
    "store.register", "beat.put", "room.say", "message.ask", "store.open", "engine.submit",
    "results.send", "results.acknowledged", "message.ack",
)  # fmt: skip
async def work(fleet: Fleet) -> None:
    """Lines of an executor that is lost run elsewhere; what it had sent counts once."""
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
    batch_id = await fleet.batch(4, delay_ms=1_500)
    await fleet.until(lambda: fleet.reached)
    await fleet.completed(batch_id)


@stories.windows("store.report_death")
async def death(fleet: Fleet) -> None:
    """A line that ends its engine is put apart, whether or not its executor lives to tell."""
    await fleet.open()
    fleet.begin()
    batch_id = await fleet.batch(8, first={"crash": 3}, delay_ms=50)
    await fleet.until(lambda: fleet.reached)
    await fleet.completed(batch_id)


@stories.windows("store.hand_back", "message.give_back", "beat.forget")
async def leaving(fleet: Fleet) -> None:
    """What is told to stop hands back what it holds; what it could not is found again."""
    await fleet.open()
    fleet.begin()
    batch_id = await fleet.batch(4, delay_ms=1_000)
    while not fleet.reached:
        await fleet.until(lambda: fleet.open_attempts("executor-0"))
        pid = fleet.armed.pid
        fleet.armed.send(signal.SIGTERM)
        await fleet.until(lambda pid=pid: fleet.armed.frozen or fleet.armed.pid != pid)  # type: ignore[misc]  # bound now
    await fleet.completed(batch_id)


@pytest.mark.parametrize("step", stories.to_kill())
async def test_killed(step: str, template: Template, tmp_path: Path) -> None:
    await stories.killed(step, template, tmp_path)


@pytest.mark.parametrize("place", stories.to_freeze())
async def test_frozen(place: str, template: Template, tmp_path: Path) -> None:
    await stories.frozen(place, template, tmp_path)
