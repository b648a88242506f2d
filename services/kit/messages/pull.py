"""Pulling dispatches: what an executor is handed, and how it asks for more."""

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Final

import nats.errors
import nats.js.errors
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from protos.nightshift.v1 import dispatch_pb2
from services.kit.messages.streams import WORK_STREAM, BusFault
from services.kit.process import failpoints
from services.kit.process.log import get_logger

_log = get_logger(__name__)

FETCH_SECONDS: Final = 2.0
"""How long a fetch waits: a request lost with the broker's restart is not missed for longer."""
MESSAGE_VERSION: Final = 1
"""Version of `Dispatch` that this code writes and understands."""

# For the broker's word that a request has ended to arrive.
_REST_SECONDS: Final = 0.1

# A dispatch of a newer version goes back with a delay that doubles with each delivery, and who
# got nothing else steps out of the line for a moment, so that a newer executor meets it soon.
_FIRST_NEWER_SECONDS: Final = 0.25
_MOST_NEWER_SECONDS: Final = 5.0
_MOST_PAUSE_SECONDS: Final = 1.0
# What cannot be read at all is left like one of a version that nobody here has.
_UNREADABLE: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery of a dispatch; exactly one of its three answers is given."""

    message: Msg
    dispatch: dispatch_pb2.Dispatch
    num_delivered: int

    async def ack(self) -> None:
        """Say that the message is dealt with; waits for the broker's word."""
        with failpoints.around("message.ack"):
            await self.message.ack_sync(timeout=5)

    async def give_back(self, delay_seconds: float) -> None:
        """Have it delivered again after `delay_seconds`; said now, or not at all."""
        self._refuse_late_words()
        with failpoints.around("message.give_back"):
            await self.message.nak(delay=max(delay_seconds, 0.05))

    async def keep(self) -> None:
        """Put its redelivery off by another `ACK_WAIT_SECONDS`; now, or not at all."""
        self._refuse_late_words()
        with failpoints.around("message.keep"):
            await self.message.in_progress()

    def _refuse_late_words(self) -> None:
        """Raise where the client would only say it once it is connected again.

        The message is somebody else's by then, who would lose it (measured).
        """
        client: Client = self.message._client  # noqa: SLF001 -- it does not tell otherwise
        if not client.is_connected:
            raise nats.errors.ConnectionClosedError


class Puller:
    """Pulls a pool's dispatches as this executor has room for them.

    Not by the client's own `fetch`: where several executors wait, that one may hold a message back
    for the rest of the wait, in the hope of a full batch (measured: 1.8 s).
    """

    def __init__(
        self, client: Client, subscription: Subscription, durable: str, version: int
    ) -> None:
        """Pull from a consumer into a wildcard inbox of its own; made by `Bus.pull_from`."""
        self._client = client
        self._subscription = subscription
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{WORK_STREAM}.{durable}"
        self._version = version
        self._requests = 0
        self._newer_in_a_row = 0

    async def fetch(self, most: int) -> list[Delivery]:
        """Return 1 to `most` deliveries as soon as there are any, or none after `FETCH_SECONDS`.

        Dispatches that it does not understand, as of a newer version, go back for others.

        Raises:
            nats.errors.Error: stream or consumer is gone, or has no leader; back off and ask again,
                which finds it once it is there.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + FETCH_SECONDS
        # One shot: the broker ends it once it has given what there is.
        messages = await self._ask(most, until, one_shot=True)
        if not messages and until - loop.time() > _REST_SECONDS:
            # Refused, because others wait for what there is just now: wait in line.
            messages = await self._ask(1, until, one_shot=False)
        read = [
            Delivery(message, _read(message.data), message.metadata.num_delivered)
            for message in messages
        ]
        newer = [each for each in read if each.dispatch.version > self._version]
        for delivery in newer:
            await self._leave(delivery)
        if newer and len(newer) == len(read):
            await asyncio.sleep(min(_growing(self._newer_in_a_row), _MOST_PAUSE_SECONDS))
            self._newer_in_a_row += 1
        elif read:
            self._newer_in_a_row = 0
        return [each for each in read if each.dispatch.version <= self._version]

    async def _leave(self, delivery: Delivery) -> None:
        """Leave a dispatch to a newer executor."""
        delay = _growing(delivery.num_delivered - 1)
        _log.warning(
            "dispatch_of_newer_version",
            version=delivery.dispatch.version,
            understood=self._version,
            chunk=delivery.dispatch.chunk_id,
            again_in_seconds=delay,
        )
        # Untold, it comes back by itself.
        with contextlib.suppress(*BusFault):
            await delivery.give_back(delay)

    async def _ask(self, most: int, until: float, *, one_shot: bool) -> list[Msg]:
        """Send one request and return what it brings, with what a former one brought too late."""
        loop = asyncio.get_running_loop()
        self._requests += 1
        inbox = f"{self._subscription.subject[:-1]}{self._requests}"
        wish = {"batch": most, "expires": int((until - loop.time()) * 1e9), "no_wait": one_shot}
        with failpoints.around("message.ask"):
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


def _read(data: bytes) -> dispatch_pb2.Dispatch:
    try:
        return dispatch_pb2.Dispatch.FromString(data)
    except DecodeError:
        # One such message would else end every executor that it comes to, again and again.
        return dispatch_pb2.Dispatch(version=_UNREADABLE)


def _growing(times: int) -> float:
    """Return the delay after `times` earlier ones, in seconds."""
    return min(_FIRST_NEWER_SECONDS * 2.0 ** min(times, 16), _MOST_NEWER_SECONDS)
