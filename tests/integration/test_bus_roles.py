"""What each service may do at the broker, against a real nats-server that asks for passwords."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from protos.nightshift.v1 import dispatch_pb2
from services.kit.messages import bus as buses
from services.kit.messages import subjects
from services.kit.messages.bus import Bus
from services.kit.messages.bus_login import Login
from services.kit.messages.bus_roles import ROLES, authorization
from services.kit.wire.ids import pool_id_of
from tests.kit.eventually import eventually
from tests.kit.nats_server import NatsServer, refuses_strangers

pytestmark = pytest.mark.integration

POOL = pool_id_of("llama")
EVENT = dispatch_pb2.Event(kind=dispatch_pb2.EVENT_KIND_BATCH_CANCELLING, batch_id="batch_1")
DISPATCH = dispatch_pb2.Dispatch(
    version=1, chunk_id="chunk_1", dispatch=1, pool_id=POOL, line_count=1
)
BEAT = dispatch_pb2.ExecutorBeat(executor_id="executor-0", pool_id=POOL, at_ms=1)
FORBIDDEN = {
    "executor": [
        subjects.event_subject(EVENT),
        subjects.work_subject(POOL),
        "$JS.API.STREAM.DELETE.WORK",
        "$JS.API.STREAM.DELETE.EVENTS",
        "$JS.API.STREAM.PURGE.WORK",
        "$JS.API.STREAM.UPDATE.WORK",
        f"$JS.API.CONSUMER.DELETE.WORK.{subjects.durable_of(POOL)}",
    ],
    "scheduler": [subjects.event_subject(EVENT), subjects.beat_subject("executor-0")],
    "store": [subjects.work_subject(POOL), "$JS.API.STREAM.DELETE.WORK"],
}


class Broker:
    """A nats-server that knows the roles, and files with their passwords."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = NatsServer(folder / "server", "--config", str(folder / "nats.conf"))
        self.runs = False
        self.set_passwords("first")

    def set_passwords(self, beginning: str) -> None:
        passwords = {role: f"{beginning}-{role}" for role in ROLES}
        for role, password in passwords.items():
            (self.folder / role).write_text(password + "\n")
        self.configure(authorization(passwords))

    def configure(self, text: str) -> None:
        """Have it read another configuration, if it runs."""
        (self.folder / "nats.conf").write_text(text)
        if self.runs:
            os.kill(self.server.pid, signal.SIGHUP)

    def login(self, role: str) -> Login:
        return Login(role, self.folder / role)

    async def service(self, role: str) -> Bus:
        return await buses.connect(self.server.url, role, login=self.login(role))

    async def client(self, role: str) -> Client:
        login = self.login(role)
        return await nats.connect(self.server.url, user=role, password=login.password())


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path)
    broker.server.start()
    broker.runs = True
    yield broker
    broker.server.stop()


@pytest.fixture
async def roles(broker: Broker) -> AsyncIterator[dict[str, Bus]]:
    found = {role: await broker.service(role) for role in ("store", "scheduler", "executor")}
    yield found
    for bus in found.values():
        await bus.close()


async def is_now(asked: Awaitable[object], wanted: object) -> bool:
    """Tell whether a question is answered so by now."""
    return await asked == wanted


async def test_each_service_may_do_its_work(roles: dict[str, Bus]) -> None:
    store, scheduler, executor = roles.values()
    heard: list[str] = []

    async def on_event(event: dispatch_pb2.Event) -> None:
        heard.append(event.batch_id)

    async def on_room(beat: dispatch_pb2.ExecutorBeat) -> None:
        heard.append(beat.executor_id)

    # Whoever comes first makes the streams; whoever looks after that changes them.
    await scheduler.ensure_streams()
    await store.ensure_streams()
    await scheduler.on_event(on_event)
    await scheduler.on_room(on_room)
    await executor.on_event(on_event)
    assert await scheduler.ensure_consumer(POOL) == 0
    await scheduler.publish_dispatch(DISPATCH)
    await eventually(lambda: is_now(scheduler.pending(POOL), 1))
    [delivery] = await (await executor.pull_from(POOL)).fetch(1)
    assert delivery.dispatch == DISPATCH
    await delivery.keep()
    await delivery.ack()
    await executor.put_beat(BEAT)
    await eventually(lambda: is_now(scheduler.beats(), [BEAT]))
    await executor.forget("executor-0")
    await eventually(lambda: is_now(scheduler.beats(), []))
    await executor.say_room(BEAT)
    await store.publish_event(subjects.event_subject(EVENT), EVENT.SerializeToString(), "1")
    await eventually(
        lambda: sorted(heard) == ["batch_1", "batch_1", "executor-0"], within_seconds=30
    )


async def test_nobody_may_do_more_than_that(broker: Broker, roles: dict[str, Bus]) -> None:
    await roles["store"].ensure_streams()
    await roles["scheduler"].ensure_consumer(POOL)
    assert refuses_strangers(broker.server.url.removeprefix("nats://"))
    operator = await broker.client("operator")
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    await operator.subscribe(">", cb=hear)
    await operator.flush()
    for role, wanted in FORBIDDEN.items():
        client = await broker.client(role)
        for subject in wanted:
            await client.publish(subject, b"")
        await client.flush()
        await client.close()
    await operator.flush()
    assert not {subject for wanted in FORBIDDEN.values() for subject in wanted} & set(heard)
    await operator.close()


async def test_a_password_may_be_changed_while_all_runs(
    broker: Broker, roles: dict[str, Bus]
) -> None:
    scheduler = roles["scheduler"]
    await scheduler.ensure_streams()
    lost = asyncio.Event()

    async def note() -> None:
        lost.set()

    scheduler._client._disconnected_cb = note
    broker.set_passwords("second")
    await lost.wait()
    await eventually(lambda: scheduler.connected)
    await scheduler.ensure_consumer(POOL)
    await scheduler.publish_dispatch(DISPATCH)


async def test_a_system_without_passwords_is_moved_to_them_while_it_runs(broker: Broker) -> None:
    address = broker.server.url.removeprefix("nats://")
    asked = (broker.folder / "nats.conf").read_text()
    broker.configure("")
    await eventually(lambda: not refuses_strangers(address))
    # Whom it does not ask may show a password all the same.
    scheduler = await broker.service("scheduler")
    await scheduler.ensure_streams()
    broker.configure(asked)
    await eventually(lambda: refuses_strangers(address))

    async def works() -> bool:
        try:
            return await scheduler.ensure_consumer(POOL) == 0
        except buses.BusFault:
            return False

    await eventually(works)
    await scheduler.close()
