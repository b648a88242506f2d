"""The message bus: JetStream carries work and events, a KV bucket says who is alive.

All truth is in the store. Losing a message, a stream or a bucket only delays.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import api
from nats.js.kv import KeyValue

from protos.nightshift.v1 import dispatch_pb2
from services.kit import failpoints
from services.kit.ids import PoolId
from services.kit.log import get_logger
from services.kit.subjects import durable_of, room_subject, work_subject

_log = get_logger(__name__)

WORK_STREAM: Final = "WORK"
EVENT_STREAM: Final = "EVENTS"
EXECUTORS_BUCKET: Final = "executors"
ACK_WAIT_SECONDS: Final = 10.0
"""Time after which an unacknowledged message is delivered again."""
IN_PROGRESS_SECONDS: Final = 3.0
"""How often a message that is worked on is kept from being delivered again."""
FETCH_SECONDS: Final = 2.0
"""How long a fetch waits: a request lost with the broker's restart is not missed for longer."""
MESSAGE_VERSION: Final = 1
"""Version of `Dispatch` that this code writes and understands."""

# Longer than the longest completion window (7 days): reconciling, not the broker, decides.
_WORK_MAX_AGE_SECONDS: Final = 8 * 86_400
# nats-server's "error creating store for consumer": its files do not read.
_CONSUMER_STORE_FAILED: Final = 10_012
_DUPLICATE_WINDOW_SECONDS: Final = 120
_EVENT_MAX_AGE_SECONDS: Final = 3_600
_EVENT_MAX_BYTES: Final = 64 * 1024 * 1024
# Settings that may be changed on what exists.
_CHOSEN: Final = frozenset(
    {"subjects", "max_age", "max_bytes", "duplicate_window", "ack_wait", "max_ack_pending"}
)

BusFault: Final = (nats.errors.Error, OSError)
"""What every call here may raise while the broker is away, slow or made anew; try again later."""

# For the broker's word that a request has ended to arrive.
_REST_SECONDS: Final = 0.1

# A publish that gets no answer is repeated under the same id, so that a short wait costs nothing
# and a broker that comes back is used at once.
_ANSWER_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of a dispatch; exactly one of its three answers is given."""

    message: Msg
    dispatch: dispatch_pb2.Dispatch
    num_delivered: int

    async def ack(self) -> None:
        """Say that the message is dealt with; waits for the broker's word."""
        failpoints.before("message.ack")
        await self.message.ack_sync(timeout=5)
        failpoints.after("message.ack")

    async def give_back(self, delay_seconds: float) -> None:
        """Have it delivered again after `delay_seconds`."""
        failpoints.before("message.give_back")
        await self.message.nak(delay=max(delay_seconds, 0.05))
        failpoints.after("message.give_back")

    async def keep(self) -> None:
        """Put its redelivery off by another `ACK_WAIT_SECONDS`."""
        await self.message.in_progress()


class Puller:
    """Pulls a pool's dispatches as this executor has room for them.

    Not by the client's own `fetch`: where several executors wait, that one may hold a message back
    for the rest of the wait, in the hope of a full batch (measured: 1.8 s).
    """

    def __init__(self, client: Client, subscription: Subscription, durable: str) -> None:
        """Pull from a consumer into a wildcard inbox of its own; made by `Bus.pull_from`."""
        self._client = client
        self._subscription = subscription
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{WORK_STREAM}.{durable}"
        self._requests = 0

    async def fetch(self, most: int) -> list[Delivery]:
        """Return 1 to `most` deliveries as soon as there are any, or none after `FETCH_SECONDS`.

        Raises:
            nats.errors.Error: stream or consumer is gone; back off and make another puller.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + FETCH_SECONDS
        try:
            # One shot: the broker ends it once it has given what there is.
            messages = await self._ask(most, until, one_shot=True)
            if not messages and until - loop.time() > _REST_SECONDS:
                # Refused, because others wait for what there is just now: wait in line.
                messages = await self._ask(1, until, one_shot=False)
        except BusFault:
            with contextlib.suppress(*BusFault):
                await self._subscription.unsubscribe()
            raise
        deliveries = []
        for message in messages:
            dispatch = dispatch_pb2.Dispatch.FromString(message.data)
            if dispatch.version > MESSAGE_VERSION:
                # Left alone for a newer executor: it comes back by itself.
                _log.warning("dispatch_of_newer_version", version=dispatch.version)
                continue
            deliveries.append(Delivery(message, dispatch, message.metadata.num_delivered))
        return deliveries

    async def _ask(self, most: int, until: float, *, one_shot: bool) -> list[Msg]:
        """Send one request and return what it brings, with what a former one brought too late."""
        loop = asyncio.get_running_loop()
        self._requests += 1
        inbox = f"{self._subscription.subject[:-1]}{self._requests}"
        wish = {"batch": most, "expires": int((until - loop.time()) * 1e9), "no_wait": one_shot}
        await self._client.publish(self._subject, json.dumps(wish).encode(), reply=inbox)
        found: list[Msg] = []
        while len(found) < most:
            # Its end is told. Should that be lost, what it still brings waits for the next fetch.
            wait = 0.0 if found else until - loop.time()
            try:
                message = await self._subscription.next_msg(max(0.0, wait) + _REST_SECONDS)
            except nats.errors.TimeoutError:
                break
            status = (message.headers or {}).get("Status")
            if status is None:
                found.append(message)
            elif message.subject != inbox:  # the end of a former request
                continue
            elif found or status in {"404", "408"}:
                break  # a fault after the first message is met again by the next fetch
            else:
                raise nats.js.errors.APIError.from_msg(message)
        return found


class Bus:
    """A connection to NATS that never gives up."""

    def __init__(self, client: Client) -> None:
        """Wrap a connected client; made by `connect`."""
        self._client = client
        self._jetstream = client.jetstream(timeout=_ANSWER_SECONDS)
        self._bucket: KeyValue | None = None

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
        """Make the streams and the bucket where they are missing; repeatable."""
        work = api.StreamConfig(
            name=WORK_STREAM,
            subjects=["nightshift.work.>"],
            retention=api.RetentionPolicy.WORK_QUEUE,
            storage=api.StorageType.FILE,
            max_age=_WORK_MAX_AGE_SECONDS,
            duplicate_window=_DUPLICATE_WINDOW_SECONDS,
        )
        events = api.StreamConfig(
            name=EVENT_STREAM,
            subjects=["nightshift.event.>"],
            retention=api.RetentionPolicy.LIMITS,
            storage=api.StorageType.FILE,
            max_age=_EVENT_MAX_AGE_SECONDS,
            max_bytes=_EVENT_MAX_BYTES,
            duplicate_window=_DUPLICATE_WINDOW_SECONDS,
        )
        for config in (work, events):
            try:
                info = await self._jetstream.stream_info(config.name or "")
            except nats.js.errors.NotFoundError:
                await self._jetstream.add_stream(config)
                continue
            # What exists keeps its old settings until it is told otherwise.
            if _differs(config, info.config):
                await self._jetstream.update_stream(config)
        await self._executors()

    async def _executors(self) -> KeyValue:
        """Return the bucket, made where it is missing; known from then on until a call fails."""
        if self._bucket is None:
            try:
                self._bucket = await self._jetstream.key_value(EXECUTORS_BUCKET)
            except nats.js.errors.NotFoundError:
                self._bucket = await self._jetstream.create_key_value(
                    api.KeyValueConfig(bucket=EXECUTORS_BUCKET, history=1, ttl=60)
                )
        return self._bucket

    async def ensure_consumer(self, pool_id: PoolId) -> int:
        """Make a pool's durable pull consumer where it is missing; repeatable.

        Returns:
            Dispatches of the pool that are published and not yet delivered.

        Raises:
            nats.js.errors.NotFoundError: the stream is missing.
        """
        wanted = api.ConsumerConfig(
            durable_name=durable_of(pool_id),
            filter_subject=work_subject(pool_id),
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_SECONDS,
            max_deliver=-1,
            max_ack_pending=10_000,
        )
        try:
            info = await self._jetstream.consumer_info(WORK_STREAM, durable_of(pool_id))
        except nats.js.errors.NotFoundError:
            info = await self._add_consumer(wanted)
        else:
            if _differs(wanted, info.config):
                info = await self._add_consumer(wanted)
        return info.num_pending or 0

    async def _add_consumer(self, wanted: api.ConsumerConfig) -> api.ConsumerInfo:
        """Make a consumer; a stream whose files are damaged is made anew: it holds hints only."""
        try:
            return await self._jetstream.add_consumer(WORK_STREAM, wanted)
        except nats.js.errors.APIError as error:
            if error.err_code != _CONSUMER_STORE_FAILED:
                raise
            _log.warning("damaged_stream_made_anew", stream=WORK_STREAM, error=str(error))
            await self._jetstream.delete_stream(WORK_STREAM)
            await self.ensure_streams()
            return await self._jetstream.add_consumer(WORK_STREAM, wanted)

    async def pending(self, pool_id: PoolId) -> int:
        """Return how many dispatches of a pool are published and not yet delivered."""
        info = await self._jetstream.consumer_info(WORK_STREAM, durable_of(pool_id))
        return info.num_pending or 0

    async def pull_from(self, pool_id: PoolId) -> Puller:
        """Bind to a pool's consumer.

        Raises:
            nats.js.errors.NotFoundError: the scheduler has not made it yet.
        """
        durable = durable_of(pool_id)
        await self._jetstream.consumer_info(WORK_STREAM, durable)
        subscription = await self._client.subscribe(f"{self._client.new_inbox()}.*")
        return Puller(self._client, subscription, durable)

    async def publish_dispatch(self, dispatch: dispatch_pb2.Dispatch) -> None:
        """Publish a dispatch once: a repeat while unanswered is swallowed by its message id.

        Raises:
            nats.errors.Error, TimeoutError: no answer; publish the same one again.
        """
        headers = {"Nats-Msg-Id": f"{dispatch.chunk_id}:{dispatch.dispatch}"}
        if dispatch.traceparent:
            headers["traceparent"] = dispatch.traceparent
        failpoints.before("dispatch.publish")
        await self._jetstream.publish(
            work_subject(PoolId(dispatch.pool_id)), dispatch.SerializeToString(), headers=headers
        )
        failpoints.after("dispatch.publish")

    async def publish_event(self, subject: str, payload: bytes, message_id: str) -> None:
        """Publish an outbox row; its id makes a repeat harmless."""
        failpoints.before("event.publish")
        await self._jetstream.publish(subject, payload, headers={"Nats-Msg-Id": message_id})
        failpoints.after("event.publish")

    async def on_event(self, handle: Callable[[dispatch_pb2.Event], Awaitable[None]]) -> None:
        """Call `handle` for every event from now on."""

        async def receive(message: Msg) -> None:
            await handle(dispatch_pb2.Event.FromString(message.data))

        await self._client.subscribe("nightshift.event.>", cb=receive)

    async def say_room(self, beat: dispatch_pb2.ExecutorBeat) -> None:
        """Tell the scheduler at once what this executor has room for; may be lost."""
        await self._client.publish(room_subject(PoolId(beat.pool_id)), beat.SerializeToString())

    async def on_room(self, handle: Callable[[dispatch_pb2.ExecutorBeat], Awaitable[None]]) -> None:
        """Call `handle` for every executor's word from now on."""

        async def receive(message: Msg) -> None:
            await handle(dispatch_pb2.ExecutorBeat.FromString(message.data))

        await self._client.subscribe("nightshift.room.>", cb=receive)

    async def put_beat(self, beat: dispatch_pb2.ExecutorBeat) -> None:
        """Record an executor's beat under its name."""
        try:
            await (await self._executors()).put(beat.executor_id, beat.SerializeToString())
        except BusFault:
            self._bucket = None
            raise

    async def beats(self) -> list[dispatch_pb2.ExecutorBeat]:
        """Return the last beat of every executor that the bucket knows; sweep them by age."""
        try:
            # Its type is only partly declared.
            watcher: Any = await (await self._executors()).watchall(ignore_deletes=True)
        except BusFault:
            self._bucket = None
            raise
        found = []
        try:
            # The first None marks the end of what stands there now.
            while (entry := await watcher.updates(timeout=_ANSWER_SECONDS)) is not None:
                found.append(dispatch_pb2.ExecutorBeat.FromString(entry.value or b""))
        finally:
            await watcher.stop()
        return found

    async def forget(self, executor_id: str) -> None:
        """Remove an executor that leaves by itself."""
        await (await self._executors()).delete(executor_id)


def _differs(
    wanted: api.StreamConfig | api.ConsumerConfig, found: api.StreamConfig | api.ConsumerConfig
) -> bool:
    """Tell whether a setting that this code chooses stands otherwise at the broker."""
    return any(
        value is not None and value != getattr(found, name)
        for name, value in vars(wanted).items()
        if name in _CHOSEN
    )


async def connect(url: str, name: str) -> Bus:
    """Connect to NATS, waiting for it as long as it takes.

    Args:
        url: one or more `nats://host:port`, separated by commas.
        name: shown in the broker's own monitoring.
    """
    last_error = ""

    async def on_error(error: Exception) -> None:
        # Each of the attempts to reconnect fails alike: one line an outage says it all.
        nonlocal last_error
        text = str(error) or type(error).__name__
        if text != last_error:
            _log.warning("bus_error", error=text)
        last_error = text

    async def on_disconnected() -> None:
        if not client.is_draining and not client.is_closed:
            _log.warning("bus_disconnected")

    async def on_reconnected() -> None:
        nonlocal last_error
        last_error = ""
        _log.info("bus_reconnected")

    client = await nats.connect(
        servers=url.split(","),
        name=name,
        # The default gives up after a minute or two; a broker may be away for longer.
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.25,
        connect_timeout=2,
        ping_interval=5,
        max_outstanding_pings=2,
        allow_reconnect=True,
        error_cb=on_error,
        disconnected_cb=on_disconnected,
        reconnected_cb=on_reconnected,
    )
    return Bus(client)
