"""The bucket of beats: the last word of each executor, put by itself and read by the scheduler."""

import contextlib
import json
from typing import Any, Final

import nats.errors
import nats.js.errors
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from protos.nightshift.v1 import dispatch_pb2
from services.kit.messages.streams import BEATS_STREAM, Layout
from services.kit.messages.subjects import ANY_BEAT, beat_subject
from services.kit.process import failpoints

_ANSWER_SECONDS: Final = 2.0
_BATCH: Final = 1_000
_NOTHING_THERE: Final = "404"
_NOBODY_ANSWERS: Final = "503"
_DELETED: Final = {"KV-Operation": "DEL"}
_HEADER_PENDING: Final = "Nats-Num-Pending"
_HEADER_NUMBER: Final = "Nats-Sequence"


class Beats:
    """Speaks the protocol of NATS' KV buckets itself.

    The client's own way to list a bucket is a watch, which leaves a consumer at the broker for five
    minutes; a direct get of many messages leaves nothing.
    """

    def __init__(self, client: Client, jetstream: JetStreamContext, layout: Layout) -> None:
        """Use a connection; `layout` makes the bucket where it is missing."""
        self._connection = client
        self._jetstream = jetstream
        self._layout = layout

    async def put(self, beat: dispatch_pb2.ExecutorBeat) -> None:
        """Record an executor's beat under its name."""
        with failpoints.around("beat.put"):
            subject = beat_subject(beat.executor_id)
            await self._jetstream.publish(subject, beat.SerializeToString())

    async def forget(self, executor_id: str) -> None:
        """Remove an executor that leaves by itself."""
        with failpoints.around("beat.forget"):
            await self._jetstream.publish(beat_subject(executor_id), b"", headers=dict(_DELETED))

    async def read(self) -> list[dispatch_pb2.ExecutorBeat]:
        """Return the last beat of every executor; a bucket that is missing is made.

        Raises:
            BusFault: the broker does not answer.
        """
        inbox = self._connection.new_inbox()
        answers = await self._connection.subscribe(inbox)
        try:
            found: list[dispatch_pb2.ExecutorBeat] = []
            after: int | None = 0
            while after is not None:
                after = await self._read_some(answers, inbox, after, found)
        finally:
            with contextlib.suppress(nats.errors.Error):
                await answers.unsubscribe()
        return found

    async def _read_some(
        self,
        answers: Subscription,
        inbox: str,
        after: int,
        found: list[dispatch_pb2.ExecutorBeat],
    ) -> int | None:
        """Add some beats to `found`; return the number of the last one if there are more."""
        wish = {"seq": after + 1, "next_by_subj": ANY_BEAT, "batch": _BATCH}
        subject = f"$JS.API.DIRECT.GET.{BEATS_STREAM}"
        await self._connection.publish(subject, json.dumps(wish).encode(), reply=inbox)
        while True:
            try:
                message: Msg = await answers.next_msg(_ANSWER_SECONDS)
            except nats.errors.TimeoutError:
                # As where the bucket is missing, which nothing says if anybody listens to requests.
                await self._layout.ensure_bucket()
                return None
            headers: dict[str, Any] = message.headers or {}
            status = headers.get("Status")
            if status is None:
                after = int(headers[_HEADER_NUMBER])
                # One that cannot be read must not hide the others.
                with contextlib.suppress(DecodeError):
                    if message.data:
                        found.append(dispatch_pb2.ExecutorBeat.FromString(message.data))
            elif status == _NOBODY_ANSWERS:
                await self._layout.ensure_bucket()
                return None
            elif status == _NOTHING_THERE:
                return None
            elif status == "204":
                return after if int(headers.get(_HEADER_PENDING, 0)) else None
            else:
                raise nats.js.errors.APIError.from_msg(message)
