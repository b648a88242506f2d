"""The bus against a real nats-server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
import structlog
from nats.aio.client import Client as NatsClient

from protos.nightshift.v1 import dispatch_pb2
from services.kit.messages import beats, bus, streams, subjects
from services.kit.messages.bus import Bus, BusFault
from services.kit.process.tasks import end
from services.kit.wire.ids import pool_id_of
from tests.kit.eventually import eventually
from tests.kit.nats_server import NatsServer

pytestmark = pytest.mark.integration

POOL = pool_id_of("llama")


@pytest.fixture
async def connection(nats_server: NatsServer) -> AsyncIterator[Bus]:
    connection = await bus.connect(nats_server.url, "test")
    await connection.ensure_streams()
    yield connection
    await connection.close()


def dispatch(chunk: int, number: int = 1) -> dispatch_pb2.Dispatch:
    return dispatch_pb2.Dispatch(
        version=1, chunk_id=f"chunk_{chunk:032x}", dispatch=number, pool_id=POOL, line_count=1
    )


def beat(name: str, at_ms: int = 1) -> dispatch_pb2.ExecutorBeat:
    return dispatch_pb2.ExecutorBeat(executor_id=name, pool_id=POOL, at_ms=at_ms)


async def test_streams_and_consumers_are_made_once_and_again_without_harm(connection: Bus) -> None:
    await connection.ensure_consumer(POOL)
    await connection.publish_dispatch(dispatch(1))
    await connection.ensure_streams()
    assert await connection.ensure_consumer(POOL) == 1


async def test_a_dispatch_reaches_a_puller_once(connection: Bus) -> None:
    await connection.ensure_consumer(POOL)
    await connection.publish_dispatch(dispatch(1))
    await connection.publish_dispatch(dispatch(1))
    assert await connection.pending(POOL) == 1
    [delivery] = await (await connection.pull_from(POOL)).fetch(8)
    assert delivery.dispatch == dispatch(1)
    assert delivery.num_delivered == 1
    await delivery.ack()
    assert await connection.pending(POOL) == 0


async def test_an_event_that_is_told_again_is_there_once(connection: Bus) -> None:
    event = dispatch_pb2.Event(kind=dispatch_pb2.EVENT_KIND_BATCH_READY, pool_id=POOL)
    for _ in range(2):
        await connection.publish_event(
            subjects.event_subject(event), event.SerializeToString(), "outbox-1"
        )
    info = await connection._jetstream.stream_info(bus.EVENT_STREAM)
    assert info.state.messages == 1


async def test_publishing_many_at_once_keeps_their_order(connection: Bus) -> None:
    await connection.ensure_consumer(POOL)
    sent = [dispatch(chunk) for chunk in range(64)]
    await asyncio.gather(*(connection.publish_dispatch(each) for each in sent))
    puller = await connection.pull_from(POOL)
    received: list[dispatch_pb2.Dispatch] = []
    while len(received) < len(sent):
        received += [delivery.dispatch for delivery in await puller.fetch(64)]
    assert received == sent


async def test_what_is_given_back_comes_again(connection: Bus) -> None:
    await connection.ensure_consumer(POOL)
    await connection.publish_dispatch(dispatch(1))
    puller = await connection.pull_from(POOL)
    [first] = await puller.fetch(1)
    await first.give_back(0.05)
    [second] = await puller.fetch(1)
    assert second.num_delivered == 2


async def test_no_word_on_a_message_is_said_late(connection: Bus, nats_server: NatsServer) -> None:
    """Once the client is connected again, the message may be somebody else's."""
    await connection.ensure_consumer(POOL)
    await connection.publish_dispatch(dispatch(1))
    [delivery] = await (await connection.pull_from(POOL)).fetch(1)
    nats_server.kill()
    await eventually(lambda: not connection.connected)
    for word in (delivery.keep, lambda: delivery.give_back(0.05)):
        with pytest.raises(BusFault):
            await word()


async def test_a_newer_version_is_left_for_a_newer_executor(connection: Bus) -> None:
    await connection.ensure_consumer(POOL)
    newer = dispatch(1)
    newer.version = bus.MESSAGE_VERSION + 1
    await connection.publish_dispatch(newer)
    await connection.publish_dispatch(dispatch(2))
    found = await (await connection.pull_from(POOL)).fetch(8)
    assert [delivery.dispatch.chunk_id for delivery in found] == [dispatch(2).chunk_id]


async def test_what_cannot_be_read_is_left_alone(connection: Bus, nats_server: NatsServer) -> None:
    """Both would end whoever reads them, as often as it is started again."""
    await connection.ensure_consumer(POOL)
    await connection.put_beat(beat("executor-0"))
    other = await nats.connect(nats_server.url)
    stream = other.jetstream()
    await stream.publish(subjects.work_subject(POOL), b"\xff")
    await (await stream.key_value(bus.EXECUTORS_BUCKET)).put("executor-1", b"\xff")
    await other.close()
    await connection.publish_dispatch(dispatch(2))
    found = await (await connection.pull_from(POOL)).fetch(8)
    assert [delivery.dispatch.chunk_id for delivery in found] == [dispatch(2).chunk_id]
    assert [each.executor_id for each in await connection.beats()] == ["executor-0"]


@pytest.mark.slow
async def test_newer_messages_alone_keep_an_older_executor_calm(connection: Bus) -> None:
    await connection.ensure_consumer(POOL)
    for chunk in range(20):
        newer = dispatch(chunk)
        newer.version = bus.MESSAGE_VERSION + 1
        await connection.publish_dispatch(newer)
    loop = asyncio.get_running_loop()
    older = await connection.pull_from(POOL)
    began, fetches = loop.time(), 0
    while loop.time() < began + 2:
        assert await older.fetch(8) == []
        fetches += 1
    assert fetches < 10
    present = await connection.pull_from(POOL, version=bus.MESSAGE_VERSION + 1)
    found: set[str] = set()

    async def all_came() -> bool:
        for delivery in await present.fetch(8):
            found.add(delivery.dispatch.chunk_id)
            await delivery.ack()
        return len(found) == 20

    await eventually(all_came)


async def test_pulling_from_a_pool_without_a_consumer_is_a_fault(connection: Bus) -> None:
    with pytest.raises(BusFault):
        await connection.pull_from(POOL)


async def test_a_consumer_that_is_removed_meanwhile_is_a_fault(
    connection: Bus, nats_server: NatsServer
) -> None:
    await connection.ensure_consumer(POOL)
    puller = await connection.pull_from(POOL)
    other = await nats.connect(nats_server.url)
    fetching = asyncio.create_task(puller.fetch(1))
    await eventually(lambda: _waits(other))
    await other.jetstream().delete_consumer(bus.WORK_STREAM, subjects.durable_of(POOL))
    await other.close()
    with pytest.raises(BusFault):
        await fetching


async def _waits(client: NatsClient) -> bool:
    info = await client.jetstream().consumer_info(bus.WORK_STREAM, subjects.durable_of(POOL))
    return bool(info.num_waiting)


async def test_old_settings_of_what_exists_are_brought_up_to_date(
    connection: Bus, nats_server: NatsServer
) -> None:
    other = await nats.connect(nats_server.url)
    manager = other.jetstream()
    await manager.add_consumer(
        bus.WORK_STREAM,
        durable_name=subjects.durable_of(POOL),
        filter_subject=subjects.work_subject(POOL),
        ack_policy=nats.js.api.AckPolicy.EXPLICIT,
        ack_wait=7,
        max_ack_pending=3,
    )
    await connection.ensure_consumer(POOL)
    found = (await manager.consumer_info(bus.WORK_STREAM, subjects.durable_of(POOL))).config
    assert (found.ack_wait, found.max_ack_pending) == (bus.ACK_WAIT_SECONDS, 10_000)
    # As version 0.1 made them.
    for name in ("WORK", "KV_executors"):
        old = (await manager.stream_info(name)).config
        discard = nats.js.api.DiscardPolicy.OLD
        await manager.update_stream(old.evolve(max_bytes=-1, discard=discard, allow_direct=False))
    await connection.put_beat(beat("one"))
    await connection.ensure_streams()
    for name in ("WORK", "KV_executors"):
        now = (await manager.stream_info(name)).config
        assert (now.max_bytes, now.discard) == (64 * 1024 * 1024, "new")
    assert await connection.beats() == [beat("one")]
    await other.close()


async def test_what_does_not_fit_is_refused_and_nothing_that_waits_is_lost(
    connection: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_MAX_BYTES", 4_000)
    await connection.ensure_streams()
    await connection.ensure_consumer(POOL)
    sent = 0
    with contextlib.suppress(BusFault):
        while sent < 100:
            await connection.publish_dispatch(dispatch(sent))
            sent += 1
    assert await connection.pending(POOL) == sent
    assert 0 < sent < 100
    puller = await connection.pull_from(POOL)
    [first] = await puller.fetch(1)
    assert first.dispatch == dispatch(0)
    await first.ack()
    await connection.publish_dispatch(dispatch(sent))


async def test_beats_are_the_last_of_each_executor(connection: Bus) -> None:
    assert await connection.beats() == []
    for at_ms in (1, 2):
        await connection.put_beat(beat("one", at_ms))
        await connection.put_beat(beat("two", at_ms))
    found = sorted(await connection.beats(), key=lambda each: each.executor_id)
    assert found == [beat("one", 2), beat("two", 2)]
    await connection.forget("one")
    assert await connection.beats() == [beat("two", 2)]
    await connection.forget("two")
    assert await connection.beats() == []


async def test_reading_beats_leaves_nothing_at_the_broker(connection: Bus) -> None:
    await connection.put_beat(beat("one"))
    for _ in range(20):
        assert await connection.beats() == [beat("one")]
    info = await connection._jetstream.stream_info("KV_executors")
    assert info.state.consumer_count == 0


async def test_more_beats_than_one_answer_holds_are_read(
    connection: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats, "_BATCH", 2)
    for name in ("one", "two", "three", "four", "five"):
        await connection.put_beat(beat(name))
    await connection.forget("two")
    assert {each.executor_id for each in await connection.beats()} == {
        "one",
        "three",
        "four",
        "five",
    }


async def test_events_and_room_reach_who_listens(connection: Bus, nats_server: NatsServer) -> None:
    events: list[dispatch_pb2.Event] = []
    rooms: list[dispatch_pb2.ExecutorBeat] = []

    async def on_event(event: dispatch_pb2.Event) -> None:
        events.append(event)

    async def on_room(room: dispatch_pb2.ExecutorBeat) -> None:
        rooms.append(room)

    listener = await bus.connect(nats_server.url, "listener")
    await listener.on_event(on_event)
    await listener.on_room(on_room)
    ready = dispatch_pb2.Event(kind=dispatch_pb2.EVENT_KIND_BATCH_READY, batch_id="batch_1")

    async def heard() -> bool:
        # Subscribing is not answered, so the first words may come too early.
        await connection.publish_event(subjects.event_subject(ready), ready.SerializeToString(), "")
        await connection.say_room(beat("one"))
        return bool(events and rooms)

    await eventually(heard)
    assert events[0] == ready
    assert rooms[0] == beat("one")
    await listener.close()


async def test_a_broker_made_anew_is_set_up_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = NatsServer(tmp_path_factory.mktemp("first"))
    server.start()
    connection = await bus.connect(server.url, "test")
    await connection.ensure_streams()
    await connection.put_beat(beat("one"))
    server.kill()
    server.wipe()
    server.start()

    async def set_up() -> bool:
        try:
            await connection.ensure_streams()
            await connection.ensure_consumer(POOL)
            await connection.put_beat(beat("one"))
            await connection.publish_dispatch(dispatch(1))
        except BusFault:
            return False
        return True

    await eventually(set_up)
    assert await connection.pending(POOL) == 1
    assert await connection.beats() == [beat("one")]
    await connection.close()
    server.stop()


async def test_damaged_files_of_a_consumer_are_made_anew(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    server = NatsServer(folder)
    server.start()
    try:
        connection = await bus.connect(server.url, "test")
        await connection.ensure_streams()
        await connection.ensure_consumer(POOL)
        await connection.publish_dispatch(dispatch(1))
        assert await _fetch(connection)
        server.stop()
        [state] = folder.glob("store/jetstream/*/streams/WORK/obs/*/o.dat")
        state.write_bytes(bytes(range(200)))
        server.start()

        async def works() -> bool:
            try:
                await connection.ensure_consumer(POOL)
                await connection.publish_dispatch(dispatch(2))
            except BusFault:
                return False
            return True

        await eventually(works)
        taken = await eventually(lambda: _fetch(connection))
        assert dispatch(2) in [each.dispatch for each in taken]
        await connection.close()
    finally:
        server.kill()


async def _fetch(connection: Bus) -> list[bus.Delivery]:
    return await (await connection.pull_from(POOL)).fetch(8)


async def test_connecting_waits_for_the_broker(nats_server: NatsServer) -> None:
    nats_server.stop()
    connecting = asyncio.create_task(bus.connect(nats_server.url, "early"))
    await asyncio.sleep(0)
    nats_server.start()
    connection = await connecting
    assert connection.connected
    await connection.close()


async def test_a_password_that_is_refused_is_told_once_and_not_shown(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, "--user", "us", "--pass", "right")
    server.start()
    url = server.url.replace("//", "//us:hidden@")
    with structlog.testing.capture_logs() as logs:
        connecting = asyncio.create_task(bus.connect(url, "refused"))
        # By then it has tried several times.
        began = time.monotonic()
        await eventually(lambda: time.monotonic() > began + 1.2)
    await end(connecting)
    server.stop()
    errors = [line["error"] for line in logs if line["event"] == "bus_error"]
    assert errors
    assert len(errors) == len(set(errors))
    assert any("NIGHTSHIFT_NATS_URL" in line.get("mend", "") for line in logs)
    assert "hidden" not in str(logs)
