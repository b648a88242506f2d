"""A broker that loses what stands there, under a system at work: all is made again, calmly."""

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import nats
import nats.js.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from openai import AsyncOpenAI

from services.kit.messages import bus
from services.kit.messages.subjects import durable_of
from services.kit.wire.ids import pool_id_of
from tests.kit.batches import Json, Watch, chats, check_answers, ids, outcome, run, submit
from tests.kit.eventually import eventually
from tests.kit.up import RunningUp, running_up

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

POOL = pool_id_of("simulated")
# Two executors, a scheduler and a store: each asks some times a second whatever happens.
MOST_A_SECOND = 60.0


class Requests:
    """Counts what is asked of the broker's API, by kind of request."""

    def __init__(self) -> None:
        self.by_kind: Counter[str] = Counter()

    async def note(self, message: Msg) -> None:
        """Count one."""
        self.by_kind[".".join(message.subject.split(".")[2:5])] += 1


class Broken:
    """A running system, its broker, and what is done to it."""

    def __init__(self, up: RunningUp, api: AsyncOpenAI) -> None:
        self.up = up
        self.api = api

    async def client(self) -> Client:
        """Connect to the broker."""
        broker: dict[str, Any] = {**self.up.broker(), "reconnect_time_wait": 0.1}
        return await nats.connect(**broker, max_reconnect_attempts=-1)

    async def wiped(self) -> None:
        """Kill it, with all that it stored gone when it comes back."""
        pid = self.up.kill("nats", signal.SIGSTOP)
        shutil.rmtree(self.up.data / "nats")
        self.up.kill("nats", signal.SIGKILL)
        await eventually(lambda: self.up.pids().get("nats", pid) != pid)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    """A system with two executors, which every test leaves running."""
    data = tmp_path_factory.mktemp("bus") / "data"
    with running_up(data, ("--engine", "simulated", "--executors", "2")) as running:
        yield running


@pytest.fixture
async def broken(up: RunningUp) -> AsyncIterator[Broken]:
    async with AsyncOpenAI(base_url=up.base_url, api_key="x") as api:
        # Executors are there, and wait for more.
        await run(api, chats(200, x_simulate={"delay_ms": 100}))
        yield Broken(up, api)


async def completes(broken: Broken, watch: Watch, lines: list[Json]) -> None:
    """Each line has its own answer in the end, once."""
    found = await outcome(broken.api, await watch.end(25), ids(lines))
    check_answers(found, lines)
    assert found.counts == (len(lines), len(lines), 0)


async def delete_consumer(client: Client) -> None:
    await client.jetstream().delete_consumer(bus.WORK_STREAM, durable_of(POOL))


async def delete_work(client: Client) -> None:
    await client.jetstream().delete_stream(bus.WORK_STREAM)


async def delete_events(client: Client) -> None:
    await client.jetstream().delete_stream(bus.EVENT_STREAM)


async def delete_bucket(client: Client) -> None:
    await client.jetstream().delete_key_value(bus.EXECUTORS_BUCKET)


DELETED = {
    "consumer": delete_consumer,
    "work": delete_work,
    "events": delete_events,
    "bucket": delete_bucket,
}


@pytest.mark.parametrize("what", DELETED)
async def test_what_is_deleted_under_a_batch_is_made_again(broken: Broken, what: str) -> None:
    lines = chats(2_000, what, x_simulate={"delay_ms": 250})
    watch = Watch(broken.api, await submit(broken.api, lines))
    await watch.half_way()
    client = await broken.client()
    requests = Requests()
    await client.subscribe("$JS.API.>", cb=requests.note)
    await DELETED[what](client)
    began = time.monotonic()
    await completes(broken, watch, lines)

    async def made_again() -> bool:
        stream = {"events": bus.EVENT_STREAM, "bucket": f"KV_{bus.EXECUTORS_BUCKET}"}
        try:
            await client.jetstream().stream_info(stream.get(what, bus.WORK_STREAM))
            await client.jetstream().consumer_info(bus.WORK_STREAM, durable_of(POOL))
        except nats.js.errors.NotFoundError:
            return False
        return True

    if what == "events":
        # Found when the next event finds no stream.
        await broken.api.batches.cancel((await submit(broken.api, chats(1))).id)
    await eventually(made_again)
    seconds = time.monotonic() - began
    assert requests.by_kind.total() < MOST_A_SECOND * (seconds + 1), requests.by_kind
    await client.close()


async def test_nobody_spins_while_nobody_makes_it_again(broken: Broken) -> None:
    client = await broken.client()
    scheduler = broken.up.kill("scheduler", signal.SIGSTOP)
    try:
        # Under waiting fetches of both executors.
        await delete_work(client)
        requests = Requests()
        await client.subscribe("$JS.API.>", cb=requests.note)
        began = time.monotonic()
        lines = chats(50, "meanwhile")
        watch = Watch(broken.api, await submit(broken.api, lines))
        await watch.until_status("in_progress")
        await eventually(lambda: time.monotonic() > began + 4)
        seconds = time.monotonic() - began
        assert requests.by_kind.total() < MOST_A_SECOND * seconds, requests.by_kind
    finally:
        os.kill(scheduler, signal.SIGCONT)
    await completes(broken, watch, lines)
    await client.close()


@pytest.mark.parametrize("how", ["restarted", "wiped", "frozen"])
async def test_a_broker_that_was_away_only_delays(broken: Broken, how: str) -> None:
    lines = chats(2_000, how, x_simulate={"delay_ms": 250})
    watch = Watch(broken.api, await submit(broken.api, lines))
    await watch.half_way()
    if how == "wiped":
        await broken.wiped()
    elif how == "frozen":
        pid = broken.up.kill("nats", signal.SIGSTOP)
        frozen_at = time.monotonic()
        await eventually(lambda: time.monotonic() > frozen_at + 5)
        os.kill(pid, signal.SIGCONT)
    else:
        pid = broken.up.kill("nats", signal.SIGTERM)
        await eventually(lambda: broken.up.pids().get("nats", pid) != pid)
    await completes(broken, watch, lines)
    # What was made anew is used by the next one.
    more = chats(30, "more")
    await completes(broken, Watch(broken.api, await submit(broken.api, more)), more)
