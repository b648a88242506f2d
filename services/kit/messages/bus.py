"""The message bus: JetStream carries work and events, a KV bucket says who is alive.

All truth is in the store. Losing a message, a stream or a bucket only delays.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from protos.nightshift.v1 import dispatch_pb2
from services.kit.messages.beats import Beats
from services.kit.messages.bus_login import Login
from services.kit.messages.bus_roles import inbox_prefix
from services.kit.messages.pull import FETCH_SECONDS, MESSAGE_VERSION, Delivery, Puller
from services.kit.messages.streams import (
    ACK_WAIT_SECONDS,
    EVENT_STREAM,
    EXECUTORS_BUCKET,
    WORK_STREAM,
    BusFault,
    BusGone,
    BusRefusal,
    Layout,
)
from services.kit.messages.subjects import durable_of, room_subject, work_subject
from services.kit.process import failpoints
from services.kit.process.addresses import parse_bus_urls
from services.kit.process.log import get_logger
from services.kit.wire.ids import PoolId

__all__ = [
    "ACK_WAIT_SECONDS",
    "EVENT_STREAM",
    "EXECUTORS_BUCKET",
    "FETCH_SECONDS",
    "IN_PROGRESS_SECONDS",
    "MESSAGE_VERSION",
    "WORK_STREAM",
    "Bus",
    "BusFault",
    "BusGone",
    "BusRefusal",
    "Delivery",
    "Puller",
    "connect",
]

_log = get_logger(__name__)

IN_PROGRESS_SECONDS: Final = 3.0
"""How often a message that is worked on is kept from being delivered again."""

# A publish that gets no answer is repeated under the same id, so that a short wait costs nothing
# and a broker that comes back is used at once.
_ANSWER_SECONDS: Final = 2.0
# Different faults of one outage that are logged.
_MOST_TOLD: Final = 8
# One that was on its way to a server that died is worth repeating sooner: work waits for it.
_DISPATCH_ANSWER_SECONDS: Final = 1.0


class Bus:
    """A connection to NATS that never gives up."""

    def __init__(self, client: Client, replicas: int) -> None:
        """Wrap a connected client; made by `connect`."""
        self._client = client
        self._jetstream = client.jetstream(timeout=_ANSWER_SECONDS)
        self._layout = Layout(self._jetstream, replicas)
        self._beats = Beats(client, self._jetstream, self._layout)

    @property
    def connected(self) -> bool:
        """Whether the broker is reachable right now."""
        return self._client.is_connected

    async def close(self) -> None:
        """Flush and disconnect; while the broker is away, only the latter."""
        if self._client.is_connected:
            with contextlib.suppress(*BusFault):
                async with asyncio.timeout(2):
                    # Not `drain`: it waits for the readers of subscriptions, who are gone by now.
                    await self._client.flush()
        if not self._client.is_closed:
            # uvloop raises RuntimeError when the broker closed the transport a moment before.
            with contextlib.suppress(*BusFault, RuntimeError):
                await self._client.close()

    async def ensure_streams(self) -> None:
        """Make the streams and the bucket where they are missing; repeatable.

        Raises:
            nats.errors.Error: the broker does not answer, or cannot make one that is missing.
        """
        await self._layout.ensure_streams()

    async def ensure_consumer(self, pool_id: PoolId) -> int:
        """Make a pool's durable pull consumer where it is missing; repeatable.

        Returns:
            Dispatches of the pool that are published and not yet delivered.

        Raises:
            nats.js.errors.NotFoundError: the stream is missing.
        """
        return await self._layout.ensure_consumer(pool_id)

    async def pending(self, pool_id: PoolId) -> int:
        """Return how many dispatches of a pool are published and not yet delivered."""
        info = await self._jetstream.consumer_info(WORK_STREAM, durable_of(pool_id))
        return info.num_pending or 0

    async def pull_from(self, pool_id: PoolId, *, version: int = MESSAGE_VERSION) -> Puller:
        """Bind to a pool's consumer; dispatches of a version above `version` are left to others.

        Raises:
            nats.js.errors.NotFoundError: the scheduler has not made it yet.
        """
        durable = durable_of(pool_id)
        await self._jetstream.consumer_info(WORK_STREAM, durable)
        subscription = await self._client.subscribe(f"{self._client.new_inbox()}.*")
        return Puller(self._client, subscription, durable, version)

    async def publish_dispatch(self, dispatch: dispatch_pb2.Dispatch) -> None:
        """Publish a dispatch once: a repeat while unanswered is swallowed by its message id.

        Raises:
            nats.errors.Error, TimeoutError: no answer; publish the same one again.
        """
        headers = {"Nats-Msg-Id": f"{dispatch.chunk_id}:{dispatch.dispatch}"}
        if dispatch.traceparent:
            headers["traceparent"] = dispatch.traceparent
        subject = work_subject(PoolId(dispatch.pool_id))
        with failpoints.around("dispatch.publish"):
            await self._jetstream.publish(
                subject,
                dispatch.SerializeToString(),
                headers=headers,
                timeout=_DISPATCH_ANSWER_SECONDS,
            )

    async def publish_event(self, subject: str, payload: bytes, message_id: str) -> None:
        """Publish an outbox row; its id makes a repeat harmless."""
        with failpoints.around("event.publish"):
            await self._jetstream.publish(subject, payload, headers={"Nats-Msg-Id": message_id})

    async def on_event(self, handle: Callable[[dispatch_pb2.Event], Awaitable[None]]) -> None:
        """Call `handle` for every event from now on."""

        async def receive(message: Msg) -> None:
            await handle(dispatch_pb2.Event.FromString(message.data))

        await self._client.subscribe("nightshift.event.>", cb=receive)

    async def say_room(self, beat: dispatch_pb2.ExecutorBeat) -> None:
        """Tell the scheduler at once what this executor has room for; may be lost."""
        with failpoints.around("room.say"):
            await self._client.publish(room_subject(PoolId(beat.pool_id)), beat.SerializeToString())

    async def on_room(self, handle: Callable[[dispatch_pb2.ExecutorBeat], Awaitable[None]]) -> None:
        """Call `handle` for every executor's word from now on."""

        async def receive(message: Msg) -> None:
            await handle(dispatch_pb2.ExecutorBeat.FromString(message.data))

        await self._client.subscribe("nightshift.room.>", cb=receive)

    async def put_beat(self, beat: dispatch_pb2.ExecutorBeat) -> None:
        """Record an executor's beat under its name."""
        await self._beats.put(beat)

    async def beats(self) -> list[dispatch_pb2.ExecutorBeat]:
        """Return the last beat of every executor that the bucket knows; sweep them by age."""
        return await self._beats.read()

    async def forget(self, executor_id: str) -> None:
        """Remove an executor that leaves by itself."""
        await self._beats.forget(executor_id)


class _Client(Client):
    """Connects again after whatever the broker says, such as that its passwords were changed."""

    async def _process_err(self, err_msg: str) -> None:
        """Not as the client's own, which closes for ever."""
        if "permissions violation" in err_msg.lower():
            await super()._process_err(err_msg)
        else:
            await self._process_op_err(nats.errors.Error(f"nats: {err_msg}"))


async def connect(url: str, name: str, *, replicas: int = 1, login: Login | None = None) -> Bus:
    """Connect to NATS, waiting for it as long as it takes.

    Args:
        url: one or more `nats://host:port`, separated by commas.
        name: shown in the broker's own monitoring.
        replicas: servers that keep each stream, of those that form the cluster.
        login: who we are; None means whoever `url` says, or nobody.
    """
    told: set[str] = set()
    servers = parse_bus_urls(url)
    # As they are told to logs: without what comes before an @.
    named = ", ".join(server.rpartition("@")[2].rpartition("//")[2] for server in servers)

    async def on_error(error: Exception) -> None:
        # Each of the attempts to reconnect fails alike: one line an outage says it all.
        text = str(error) or type(error).__name__
        if text in told or len(told) >= _MOST_TOLD:
            return
        told.add(text)
        mend = {}
        if "authorization" in text.lower():
            # No class of its own where it happens while connecting.
            mend["mend"] = (
                "let NIGHTSHIFT_NATS_PASSWORD_FILE (with NIGHTSHIFT_NATS_USER), or "
                "NIGHTSHIFT_NATS_URL, name a user and password that the server knows"
            )
        _log.warning("bus_error", error=text, servers=named, **mend)

    async def on_disconnected() -> None:
        if not client.is_draining and not client.is_closed:
            _log.warning("bus_disconnected")

    async def on_reconnected() -> None:
        told.clear()
        _log.info("bus_reconnected")

    client = _Client()
    # Its type says whole seconds.
    options: dict[str, Any] = {"reconnect_time_wait": 0.25}
    if login is not None:
        options |= {
            "user": login.user,
            "password": login.password,
            "inbox_prefix": inbox_prefix(login.user),
        }
    await client.connect(
        servers=servers,
        name=name,
        # The default gives up after a minute or two; a broker may be away for longer.
        max_reconnect_attempts=-1,
        connect_timeout=2,
        # A frozen server is left for another within 6 s.
        ping_interval=2,
        max_outstanding_pings=2,
        allow_reconnect=True,
        error_cb=on_error,
        disconnected_cb=on_disconnected,
        reconnected_cb=on_reconnected,
        **options,
    )
    return Bus(client, replicas)
