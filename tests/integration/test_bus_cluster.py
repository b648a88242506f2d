"""The bus on three real nats-servers, of which one or two are killed, frozen or wiped."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import nats
import pytest
from nats.aio.msg import Msg

from protos.nightshift.v1 import dispatch_pb2
from services.kit.messages import bus as buses
from services.kit.messages.bus import Bus, BusFault, Puller
from services.kit.process.clock import SystemClock
from services.scheduler.queues import Queues
from tests.kit.eventually import eventually
from tests.kit.executor_fleet import POOL, Fleet, lines
from tests.kit.nats_cluster import NatsCluster, nats_cluster
from tests.kit.nats_server import NatsServer

__all__ = ["nats_cluster"]

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

T = TypeVar("T")

# An election takes 4 to 9 s after the last word of the former leader.
ELECTION_SECONDS = 40.0


async def through_faults(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call of the bus until it is answered, as everyone who makes one does."""

    async def tried() -> list[T]:
        try:
            return [await call()]
        except BusFault:
            return []

    found = await eventually(tried, within_seconds=ELECTION_SECONDS, every_seconds=0.1)
    return found[0]


def dispatch(name: str) -> dispatch_pb2.Dispatch:
    return dispatch_pb2.Dispatch(version=1, chunk_id=name, dispatch=1, pool_id=POOL, line_count=1)


async def copies(connection: Bus) -> dict[str, int | None]:
    """Return how many copies each stream is to have."""
    found = {}
    for name in ("WORK", "EVENTS", "KV_executors"):
        info = await through_faults(lambda name=name: connection._jetstream.stream_info(name))
        found[name] = info.config.num_replicas
    return found


async def leader_of(connection: Bus, cluster: NatsCluster) -> int:
    """Return which server leads the stream of work."""

    async def known() -> str | None:
        info = await through_faults(lambda: connection._jetstream.stream_info("WORK"))
        return info.cluster.leader if info.cluster else None

    name = await eventually(known, within_seconds=ELECTION_SECONDS)
    assert name is not None
    return int(name.removeprefix("n"))


@pytest.fixture
async def connection(nats_cluster: NatsCluster) -> AsyncIterator[Bus]:
    connection = await buses.connect(nats_cluster.url, "test", replicas=3)
    await through_faults(connection.ensure_streams)
    await through_faults(lambda: connection.ensure_consumer(POOL))
    yield connection
    await connection.close()


async def taken(connection: Bus, count: int, puller: Puller | None = None) -> set[str]:
    """Pull and acknowledge until `count` different dispatches came, by one puller if given."""
    found: set[str] = set()

    async def more() -> bool:
        try:
            puller_now = puller or await connection.pull_from(POOL)
            for delivery in await puller_now.fetch(64):
                found.add(delivery.dispatch.chunk_id)
                await delivery.ack()
        except BusFault:
            return False
        return len(found) >= count

    await eventually(more, within_seconds=ELECTION_SECONDS, every_seconds=0.1)
    return found


class _Leading:
    """A scheduler that leads for good."""

    def leads(self, term: int) -> bool:
        """Tell so."""
        return term == 1


def count_tries(connection: Bus, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list of the times at which a dispatch is published, to which more are added."""
    tries: list[float] = []
    publish = connection.publish_dispatch

    async def counted(message: dispatch_pb2.Dispatch) -> None:
        tries.append(asyncio.get_running_loop().time())
        await publish(message)

    monkeypatch.setattr(connection, "publish_dispatch", counted)
    return tries


async def test_what_was_published_outlives_any_one_server(
    connection: Bus, nats_cluster: NatsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await copies(connection) == {"WORK": 3, "EVENTS": 3, "KV_executors": 3}
    for number in range(3):
        await through_faults(
            lambda number=number: connection.publish_dispatch(dispatch(f"{number}"))
        )
    puller = await connection.pull_from(POOL)
    leader = await leader_of(connection, nats_cluster)
    tries = count_tries(connection, monkeypatch)
    nats_cluster.members[leader].kill()
    queues = Queues(connection, _Leading(), SystemClock())  # type: ignore[arg-type]
    assert await queues.publish(1, [dispatch("3")]) == 1
    # For as long as nobody led it was tried again and again: who waits learns of a leader at once.
    assert len(tries) > 1.5 * (tries[-1] - tries[0])
    # It lost its disk, and is filled again by the others; then one of those may go.
    nats_cluster.members[leader].wipe()
    nats_cluster.restart(leader)

    async def caught_up() -> bool:
        info = await through_faults(lambda: connection._jetstream.stream_info("WORK"))
        peers = (info.cluster.replicas or []) if info.cluster else []
        return len(peers) == 2 and all(peer.current and not peer.offline for peer in peers)

    await eventually(caught_up, within_seconds=ELECTION_SECONDS)
    nats_cluster.members[await leader_of(connection, nats_cluster)].freeze()
    assert await taken(connection, 4, puller) == {"0", "1", "2", "3"}
    nats_cluster.members[leader].thaw()


async def test_streams_get_their_copies_when_the_servers_are_there(
    nats_cluster: NatsCluster, nats_server: NatsServer
) -> None:
    alone = await buses.connect(nats_server.url, "alone", replicas=3)
    with pytest.raises(BusFault):
        await alone.ensure_streams()
    await alone.close()

    # Made by those who knew of one server only.
    former = await buses.connect(nats_cluster.url, "former", replicas=1)
    await through_faults(former.ensure_streams)
    await through_faults(lambda: former.publish_dispatch(dispatch("1")))
    await through_faults(lambda: former.ensure_consumer(POOL))
    assert set((await copies(former)).values()) == {1}
    present = await buses.connect(nats_cluster.url, "present", replicas=3)
    await through_faults(present.ensure_streams)

    async def all_have() -> bool:
        await present.ensure_streams()
        return set((await copies(present)).values()) == {3}

    await eventually(all_have, within_seconds=ELECTION_SECONDS, every_seconds=0.2)
    assert await taken(present, 1) == {"1"}
    await former.close()
    await present.close()


async def test_a_batch_goes_on_when_most_servers_were_away(
    connection: Bus, nats_cluster: NatsCluster
) -> None:
    fleet = Fleet(connection, nats_cluster.url)
    await fleet.serve()
    first = fleet.work.add_chunk(lines(64, x_simulate={"delay_ms": 300}), pool_id=POOL)
    await through_faults(lambda: fleet.publish(first))
    await fleet.start()
    await fleet.start(name="executor-1")
    await eventually(lambda: fleet.work.chunks[first.chunk_id].done, within_seconds=30)

    leader = await leader_of(connection, nats_cluster)
    gone = [leader, (leader + 1) % 3]
    for number in gone:
        nats_cluster.members[number].kill()
    left = await nats.connect(nats_cluster.members[(leader + 2) % 3].url)
    requests: list[str] = []

    async def count(message: Msg) -> None:
        requests.append(message.subject)

    await left.subscribe("$JS.API.>", cb=count)
    await left.flush()
    second = fleet.work.add_chunk(lines(10), pool_id=POOL, first=64)
    publishing = asyncio.create_task(through_faults(lambda: fleet.publish(second)))
    began = asyncio.get_running_loop().time()
    await eventually(
        lambda: asyncio.get_running_loop().time() - began > 4, within_seconds=10
    )  # no event tells of nothing happening
    seconds = asyncio.get_running_loop().time() - began
    # Two executors wait in a line that nobody serves: a few requests a second, each.
    assert len(requests) < 2 * 8 * seconds, json.dumps(requests[-40:])
    await left.close()
    for number in gone:
        nats_cluster.restart(number)
    await publishing
    await eventually(
        lambda: fleet.work.chunks[second.chunk_id].done, within_seconds=ELECTION_SECONDS
    )

    # All of them lose all that they had.
    for member in nats_cluster.members:
        member.kill()
        member.wipe()
    nats_cluster.start()
    await through_faults(connection.ensure_streams)
    await through_faults(lambda: connection.ensure_consumer(POOL))
    third = fleet.work.add_chunk(lines(10), pool_id=POOL, first=74)
    await through_faults(lambda: fleet.publish(third))
    await eventually(
        lambda: fleet.work.chunks[third.chunk_id].done, within_seconds=ELECTION_SECONDS
    )
    assert await copies(connection) == {"WORK": 3, "EVENTS": 3, "KV_executors": 3}
    await fleet.close()
