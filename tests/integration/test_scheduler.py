"""The scheduler between a real nats-server and a scripted store."""

import asyncio
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg

from protos.nightshift.v1 import common_pb2, dispatch_pb2
from services.kit.calls import rpc
from services.kit.messages import bus
from services.kit.messages.subjects import work_subject
from services.kit.wire.errors import StaleTermError, UnavailableError
from services.kit.wire.ids import pool_id_of
from services.scheduler.main import serve
from services.scheduler.settings import SchedulerSettings
from tests.kit.eventually import eventually
from tests.kit.nats_server import NatsServer
from tests.kit.ports import free_address
from tests.kit.scheduler_world import OTHER, POOL, World, lines_of, world
from tests.kit.scripted_puller import ScriptedPuller
from tests.kit.scripted_window import SECRET
from tests.kit.tcp_proxy import TcpProxy

__all__ = ["world"]

pytestmark = [pytest.mark.integration, pytest.mark.slow]


async def test_a_batch_is_cut_in_order_and_reaches_its_executor_whole(world: World) -> None:
    await world.scheduler("one")
    await world.leads("one")
    async with ScriptedPuller(world.bus, POOL, high=10_000, low=9_000) as executor:
        await world.ready("batch_1", 500)
        await world.ready("batch_2", 3)
        await eventually(lambda: lines_of(executor) == 503)
        spans = executor.lines()
        assert spans == sorted(spans)
        assert ("batch_2", 0) in {(batch, first) for batch, first, _ in spans}


async def test_only_what_there_is_room_for_leaves(world: World) -> None:
    await world.scheduler("one")
    async with ScriptedPuller(world.bus, POOL, low=50, high=100) as executor:
        await world.ready("batch_1", 10_000)
        await eventually(lambda: executor.held_lines >= 100)
        # A second of beats and reconciling changes nothing while it holds what it asked for.
        reclaims = world.work.called("ReclaimChunks")
        await eventually(lambda: world.work.called("ReclaimChunks") >= reclaims + 2)
        assert executor.held_lines <= 100 + 16
        assert world.work.batches["batch_1"].lines_cut == executor.held_lines
        await executor.finish(executor.held_lines)
        await eventually(lambda: executor.held_lines >= 100)


async def test_nothing_leaves_for_a_pool_without_an_executor_and_others_go_on(world: World) -> None:
    await world.scheduler("one")
    await world.ready("batch_1", 100, OTHER)
    async with ScriptedPuller(world.bus, POOL, high=10_000, low=9_000) as executor:
        await world.ready("batch_2", 10)
        await eventually(lambda: lines_of(executor) == 10)
    assert world.work.batches["batch_1"].lines_cut == 0


async def test_without_events_all_happens_a_tick_later(world: World) -> None:
    await world.scheduler("one", tick_seconds=1.0)
    await world.leads("one")
    async with ScriptedPuller(world.bus, POOL) as executor:
        world.work.add_batch("batch_1", POOL, 10)
        await eventually(lambda: lines_of(executor) == 10, within_seconds=3)


async def test_a_pool_that_is_new_gets_its_queue_at_once(world: World) -> None:
    await world.scheduler("one")
    await world.leads("one")
    new = pool_id_of("new")
    async with ScriptedPuller(world.bus, new) as executor:
        world.work.pool_ids.append(new)
        await world.tell(dispatch_pb2.EVENT_KIND_EXECUTOR)
        await world.ready("batch_1", 10, new)
        await eventually(lambda: lines_of(executor) == 10)


async def test_a_lost_answer_does_not_publish_twice(world: World) -> None:
    port = int(world.nats_server.url.rpartition(":")[2])
    async with TcpProxy(port) as proxy:
        one = await world.scheduler("one", nats_url=f"nats://127.0.0.1:{proxy.port}")
        await world.leads("one")
        async with ScriptedPuller(world.bus, POOL) as executor:
            # Room is known from here on, so that the batch alone is waited for.
            await world.ready("batch_1", 1)
            await eventually(lambda: lines_of(executor) == 1)
            world.work.add_batch("batch_2", POOL, 1)
            held_back = world.work.failures["CutChunks"]
            held_back.append(UnavailableError("a moment"))
            await world.tell(dispatch_pb2.EVENT_KIND_BATCH_READY, "batch_2")
            await eventually(lambda: not held_back)
            proxy.lose_answers = True
            await eventually(lambda: lines_of(executor) == 2)
            sent = proxy.sent
            await eventually(lambda: proxy.sent > sent + 100)
            proxy.lose_answers = False
            await world.ready("batch_3", 1)
            await eventually(lambda: lines_of(executor) == 3)
        await one.stop()
        info = await _work_stream(world)
        assert info.state.last_seq == 3
    assert [each.batch_id for each in executor.received] == ["batch_1", "batch_2", "batch_3"]


async def test_a_standby_takes_over_when_the_leader_resigns(world: World) -> None:
    one = await world.scheduler("one")
    await world.leads("one")
    await world.scheduler("two")
    await one.stop()
    await world.leads("two")
    assert world.work.called("Resign") == 1
    async with ScriptedPuller(world.bus, POOL) as executor:
        await world.ready("batch_1", 10)
        await eventually(lambda: lines_of(executor) == 10)


async def test_a_standby_takes_over_within_the_lease_when_the_leader_is_gone(world: World) -> None:
    one = await world.scheduler("one")
    await world.leads("one")
    await one.vanish()
    assert world.work.called("Resign") == 0
    await world.scheduler("two")
    await eventually(lambda: world.work.holder == "two", within_seconds=5)


async def test_one_of_two_leads(world: World) -> None:
    await world.scheduler("one")
    await world.scheduler("two")
    async with ScriptedPuller(world.bus, POOL, low=900, high=1_000) as executor:
        await world.ready("batch_1", 300)
        await eventually(lambda: lines_of(executor) == 300)
    terms = {request.term for name, request in world.work.calls if name == "CutChunks"}
    assert terms == {1}


async def test_a_term_that_is_over_stops_the_leader_until_it_leads_again(world: World) -> None:
    await world.scheduler("one")
    await world.leads("one")
    async with ScriptedPuller(world.bus, POOL) as executor:
        world.work.failures["CutChunks"].append(StaleTermError("over"))
        leads = world.work.called("Lead")
        await world.ready("batch_1", 10)
        await eventually(lambda: lines_of(executor) == 10)
    names = [name for name, _ in world.work.calls]
    stale = names.index("CutChunks")
    assert "Lead" in names[stale : names.index("CutChunks", stale + 1)]
    assert world.work.called("Lead") > leads


async def test_freed_chunks_are_published_again_at_once(world: World) -> None:
    await world.scheduler("one")
    await world.leads("one")
    async with ScriptedPuller(world.bus, POOL) as executor:
        world.work.freed.append(
            dispatch_pb2.Dispatch(
                version=1,
                batch_id="batch_1",
                chunk_id="chunk_1",
                dispatch=2,
                pool_id=POOL,
                line_count=3,
                lines=[common_pb2.LineRange(first=0, count=3)],
            )
        )
        await world.tell(dispatch_pb2.EVENT_KIND_CHUNKS_FREED)
        [received] = await eventually(lambda: executor.received)
        assert (received.chunk_id, received.dispatch) == ("chunk_1", 2)


async def test_reclaiming_tells_what_waits_in_each_queue(world: World) -> None:
    await world.scheduler("one")

    def told() -> set[tuple[str, int]]:
        asked = [request.queues for name, request in world.work.calls if name == "ReclaimChunks"]
        return {(queue.pool_id, queue.pending) for queue in asked[-1]} if asked else set()

    await eventually(lambda: told() == {(POOL, 0), (OTHER, 0)})
    await world.bus.publish_dispatch(
        dispatch_pb2.Dispatch(version=1, chunk_id="chunk_1", dispatch=1, pool_id=OTHER)
    )
    await eventually(lambda: told() == {(POOL, 0), (OTHER, 1)})


async def test_a_batch_that_is_closed_meanwhile_holds_nobody_up(world: World) -> None:
    await world.scheduler("one")
    await world.leads("one")
    world.work.closed.add("batch_1")
    async with ScriptedPuller(world.bus, POOL) as executor:
        await world.ready("batch_1", 10)
        await world.ready("batch_2", 10)
        await eventually(lambda: lines_of(executor) == 10)
        assert world.work.called("CutChunks") < 10
        world.work.closed.clear()
        await eventually(lambda: lines_of(executor) == 20)


async def test_a_broker_made_anew_only_delays(world: World) -> None:
    await world.scheduler("one")
    async with ScriptedPuller(world.bus, POOL) as executor:
        await world.ready("batch_1", 10)
        await eventually(lambda: lines_of(executor) == 10)
        world.nats_server.kill()
        world.nats_server.wipe()
        world.nats_server.start()
        world.work.add_batch("batch_2", POOL, 10)
        await eventually(lambda: _told(world, "batch_2"))
        await eventually(lambda: lines_of(executor) == 20, within_seconds=20)


async def test_a_queue_that_cannot_be_made_is_asked_for_ever_more_rarely(world: World) -> None:
    client = await nats.connect(world.nats_server.url)
    asked: list[str] = []

    async def note(message: Msg) -> None:
        asked.append(message.subject)

    await client.subscribe("$JS.API.STREAM.CREATE.>", cb=note)
    await world.bus._jetstream.delete_stream(bus.WORK_STREAM)
    # One server keeps no three copies.
    await world.scheduler("one", replicas=3)
    await eventually(lambda: asked)
    executor = ScriptedPuller(world.bus, POOL)
    words, until = 0, asyncio.get_running_loop().time() + 2

    async def said() -> bool:
        nonlocal words
        words += 1
        await world.bus.say_room(executor.word())
        return asyncio.get_running_loop().time() > until

    await eventually(said, every_seconds=0.02)
    assert words > 20
    assert len(asked) <= 10
    await client.close()


async def test_a_queue_that_cannot_be_made_keeps_no_other_from_being_made(world: World) -> None:
    """Such as one whose messages somebody else's consumer is given."""
    await world.bus._jetstream.add_consumer(
        bus.WORK_STREAM,
        nats.js.api.ConsumerConfig(
            durable_name="somebody",
            filter_subject=work_subject(POOL),
            ack_policy=nats.js.api.AckPolicy.EXPLICIT,
        ),
    )
    await world.scheduler("one")
    async with ScriptedPuller(world.bus, OTHER) as executor:
        await world.ready("batch_1", 10, OTHER)
        await eventually(lambda: lines_of(executor) == 10)
    await world.bus._jetstream.delete_consumer(bus.WORK_STREAM, "somebody")
    async with ScriptedPuller(world.bus, POOL) as executor:
        await world.ready("batch_2", 10)
        await eventually(lambda: lines_of(executor) == 10)


async def test_chunks_left_by_a_former_leader_take_room(world: World) -> None:
    await world.bus.ensure_consumer(POOL)
    for number in range(20):
        await world.bus.publish_dispatch(
            dispatch_pb2.Dispatch(
                version=1, chunk_id=f"chunk_{number}", dispatch=1, pool_id=POOL, line_count=16
            )
        )
    world.work.add_batch("batch_1", POOL, 100)
    await world.scheduler("one")
    executor = ScriptedPuller(world.bus, POOL)
    reclaims = world.work.called("ReclaimChunks")

    async def beaten() -> bool:
        # It speaks, but pulls nothing.
        await world.bus.put_beat(executor.word())
        await world.bus.say_room(executor.word())
        return world.work.called("ReclaimChunks") >= reclaims + 3

    await eventually(beaten, every_seconds=0.1)
    assert world.work.called("CutChunks") == 0


async def test_a_standby_and_a_leader_are_both_ready(world: World, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    listen = free_address()
    await world.scheduler("leader")
    await world.leads("leader")
    settings = SchedulerSettings(
        listen=listen,
        store=f"127.0.0.1:{world.store_port}",
        nats_url=world.nats_server.url,
        secret_file=secret,
    )
    stopping = asyncio.Event()
    serving = asyncio.create_task(serve(settings, stopping))
    async with rpc.open_channel(listen) as channel:
        await eventually(lambda: rpc.is_serving(channel))
    stopping.set()
    await serving
    assert world.work.holder == "leader"


async def test_stopping_while_the_broker_is_away_ends_at_once(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    nats_server.stop()
    stopping = asyncio.Event()
    settings = SchedulerSettings(listen="127.0.0.1:0", nats_url=nats_server.url, secret_file=secret)
    serving = asyncio.create_task(serve(settings, stopping))
    stopping.set()
    async with asyncio.timeout(2):
        await serving


async def _told(world: World, batch_id: str) -> bool:
    try:
        await world.tell(dispatch_pb2.EVENT_KIND_BATCH_READY, batch_id)
    except bus.BusFault:
        return False
    return True


async def _work_stream(world: World) -> nats.js.api.StreamInfo:
    client = await nats.connect(world.nats_server.url)
    try:
        return await client.jetstream().stream_info(bus.WORK_STREAM)
    finally:
        await client.close()
