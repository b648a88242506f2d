"""A scheduler dies, or stands still, at each step between the store and the broker."""

from pathlib import Path

import pytest

from services.kit.messages import bus
from tests.integration.crash_windows.fleet import Fleet, Stories
from tests.kit.store import POOL
from tests.kit.template import Template, template

__all__ = ["template"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

stories = Stories("scheduler")


@stories.windows(
    "store.lead", "consumer.make", "store.cut", "dispatch.publish", "store.report_pools",
    "store.reclaim",
)  # fmt: skip
async def work(fleet: Fleet) -> None:
    """A chunk that was cut and never published is found; who was leader once does no harm."""
    await fleet.open()
    fleet.begin()
    while not fleet.reached:
        await fleet.completed(await fleet.batch(80))
        # One that stood still elsewhere at that moment may have made the queue: again, then.
        await fleet.remove_queue()


@stories.windows("stream.remove", "consumer.make_anew")
async def damaged_queue(fleet: Fleet) -> None:
    """A queue whose files are damaged is made anew; its messages were hints only."""
    await fleet.open()
    connection = await bus.connect(fleet.nats.url, "test")
    await connection.ensure_streams()
    await connection.ensure_consumer(POOL)
    await connection.close()
    fleet.damage_queue()
    fleet.begin()
    await fleet.completed(await fleet.batch(20))
    while not fleet.reached:
        # What died after the stream was gone found it made anew, and nothing damaged.
        fleet.damage_queue()
        await fleet.restart()
        await fleet.completed(await fleet.batch(4))


@stories.windows("store.resign")
async def leaving(fleet: Fleet) -> None:
    """A leader that is told to stop gives its leadership up, or loses it by its lease."""
    await fleet.open()
    fleet.begin()
    batch_id = await fleet.batch(20, delay_ms=200)
    while not fleet.reached:
        await fleet.until(fleet.leads)
        await fleet.tell_to_stop()
    await fleet.completed(batch_id)


@pytest.mark.parametrize("name", stories.names())
async def test_killed(name: str, template: Template, tmp_path: Path) -> None:
    await stories.killed(name, template, tmp_path)


@pytest.mark.parametrize("name", stories.names())
async def test_frozen(name: str, template: Template, tmp_path: Path) -> None:
    await stories.frozen(name, template, tmp_path)
