"""A store dies, or stands still, at each step of what it makes and says at the broker."""

import asyncio
from pathlib import Path

import nats
import pytest
from nats.js import api

from protos.nightshift.v1 import dispatch_pb2
from services.kit.messages import bus
from tests.integration.crash_windows import hands
from tests.integration.crash_windows.backings import migrated_database, postgres, shared
from tests.integration.crash_windows.stories import Stories
from tests.integration.crash_windows.world import Backing, Check, World
from tests.kit.nats_server import NatsServer
from tests.kit.template import Template, template

__all__ = ["migrated_database", "postgres", "shared", "template"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

stories = Stories()
READY = dispatch_pb2.EVENT_KIND_BATCH_READY


async def broker(world: World) -> NatsServer:
    """Run a broker that the world's stores know."""
    server = NatsServer(world.folder / "nats")
    await asyncio.to_thread(server.start)
    world.set(NIGHTSHIFT_NATS_URL=server.url)
    world.at_end(server.kill)
    return server


@stories.windows("event.publish", "outbox.forget")
async def events(world: World) -> Check:
    """What happened is told at least once, and then no more."""
    server = await broker(world)
    await world.start()
    connection = await bus.connect(server.url, "test")
    heard: list[dispatch_pb2.Event] = []

    async def hear(event: dispatch_pb2.Event) -> None:
        heard.append(event)

    await connection.on_event(hear)
    await world.arm()
    batch_id = await hands.new_batch(world)
    await world.until(
        lambda: [one for one in heard if (one.kind, one.batch_id) == (READY, batch_id)]
    )
    await world.until(lambda: world.reached)

    async def check() -> None:
        await world.until(lambda: not world.sql_one("SELECT count(*) FROM outbox"))
        await connection.close()

    return check


@stories.windows("stream.make", "bucket.make")
async def empty_broker(world: World) -> Check:
    """Whoever comes to an empty broker makes what is missing."""
    server = await broker(world)
    await world.arm()
    await world.until(lambda: world.reached)
    await stands(world, server)

    async def check() -> None:
        await stands(world, server)

    return check


@stories.windows("stream.change")
async def other_settings(world: World) -> Check:
    """A stream that stands there as an older version made it is changed."""
    server = await broker(world)
    client = await nats.connect(server.url)
    await client.jetstream().add_stream(
        api.StreamConfig(name=bus.EVENT_STREAM, subjects=["nightshift.event.>"], max_age=60)
    )
    await client.close()
    await world.arm()
    await world.until(lambda: world.reached)
    await stands(world, server)

    async def check() -> None:
        await stands(world, server)

    return check


async def stands(world: World, server: NatsServer) -> None:
    """Wait until all that should stand at the broker does."""
    client = await nats.connect(server.url)
    context = client.jetstream()

    async def all_there() -> bool:
        try:
            event = await context.stream_info(bus.EVENT_STREAM)
            await context.stream_info(bus.WORK_STREAM)
            await context.key_value(bus.EXECUTORS_BUCKET)
        except nats.js.errors.NotFoundError:
            return False
        return event.config.max_age == 3_600

    try:
        await world.until(all_there)
    finally:
        await client.close()


@pytest.mark.parametrize("name", stories.names())
async def test_killed(name: str, template: Template, tmp_path: Path) -> None:
    await stories.killed(name, template, tmp_path)


@pytest.mark.parametrize("name", stories.names())
async def test_frozen(name: str, template: Template, tmp_path: Path, shared: Backing) -> None:
    await stories.frozen(name, template, tmp_path, shared)
