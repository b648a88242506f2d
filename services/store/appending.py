"""Receives result frames: assembled, made durable in groups, acknowledged in order."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from protos.nightshift.v1 import work_pb2
from services.kit.errors import InvalidRequestError, TooLargeError
from services.kit.frames import FRAME_BYTES
from services.kit.ids import ProjectId
from services.store import attempts_repo, blobs_repo, receiving, results_repo
from services.store.attempts_repo import Ticket
from services.store.context import Context
from services.store.results_repo import Frame, Recorded

Requests = AsyncIterator[work_pb2.AppendResultsRequest]
Answer = work_pb2.AppendResultsResponse

FRAMES_IN_FLIGHT: Final = 16
"""Frames of one stream that may wait for their commit."""
BYTES_IN_FLIGHT: Final = 32 * 1024 * 1024
"""Payload bytes of all streams that may wait for their commit, one frame above it at most."""
IDLE_SECONDS: Final = 60.0
"""A stream on which nothing comes for this long is ended."""
_SLACK_BYTES: Final = 2 * FRAME_BYTES
"""What a result line may have around the longest body."""
_TICKETS: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Assembled:
    """A whole frame as it came."""

    token: str
    number: int
    records: bytes
    payload: bytes


class _Budget:
    """Bytes held by frames that wait; one that is larger than all of it goes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._given = asyncio.Event()
        # One after the other, so that small ones do not go before a large one for ever.
        self._turn = asyncio.Lock()

    async def take(self, size: int) -> None:
        async with self._turn:
            while self._held and self._held + size > self._limit:
                self._given.clear()
                await self._given.wait()
            self._held += size

    def give(self, size: int) -> None:
        self._held -= size
        self._given.set()


class _Incoming:
    """The requests of one stream, which ends in order when it is idle or the store drains."""

    def __init__(self, requests: Requests, draining: asyncio.Event) -> None:
        self._requests = requests
        self._draining = draining
        self._waits_between: asyncio.Timeout | None = None

    async def next(self, *, between: bool) -> work_pb2.AppendResultsRequest | None:
        """Return the next request; `between` frames the end of the stream may be ours."""
        if between and self._draining.is_set():
            return None
        try:
            async with asyncio.timeout(IDLE_SECONDS) as limit:
                self._waits_between = limit if between else None
                return await anext(self._requests)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            # Ended in order: who has more to say opens the stream again.
            return None
        finally:
            self._waits_between = None

    async def end_with_store(self) -> None:
        """Have `next` return when the store drains; what comes after that goes to another."""
        await self._draining.wait()
        if self._waits_between is not None:
            self._waits_between.reschedule(asyncio.get_running_loop().time())


class Appender:
    """Records the frames of all streams."""

    def __init__(self, context: Context) -> None:
        """Record into the store of `context`."""
        self._context = context
        self._lease_ms = int(context.settings.lease_seconds * 1000)
        self._most = context.settings.max_line_bytes * 2 + _SLACK_BYTES
        self._budget = _Budget(BYTES_IN_FLIGHT)
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()

    async def answers(self, requests: Requests) -> AsyncIterator[Answer]:
        """Yield an acknowledgement for each frame once it is durable, in the order of frames.

        Raises:
            InvalidRequestError: a frame does not fit; those before it are recorded.
            UnavailableError: the store cannot record now; send what is unacknowledged again.
        """
        waiting: asyncio.Queue[asyncio.Task[Answer] | None] = asyncio.Queue(FRAMES_IN_FLIGHT)
        reading = asyncio.create_task(self._read(requests, waiting))
        try:
            while (task := await waiting.get()) is not None:
                yield await task
            await reading
        finally:
            _abandon(reading)
            while not waiting.empty():
                left = waiting.get_nowait()
                if left is not None:
                    _abandon(left)

    async def _read(
        self, requests: Requests, waiting: "asyncio.Queue[asyncio.Task[Answer] | None]"
    ) -> None:
        incoming = _Incoming(requests, self._context.draining)
        ending = asyncio.create_task(incoming.end_with_store())
        try:
            async for frame in self._assemble(incoming):
                await self._budget.take(len(frame.payload))
                await waiting.put(self._begin(frame))
        finally:
            ending.cancel()
            # What was read is still answered; the reader's own failure comes after it.
            await waiting.put(None)

    async def _assemble(self, incoming: _Incoming) -> AsyncIterator[_Assembled]:
        first: work_pb2.AppendResultsRequest | None = None
        pieces: list[bytes] = []
        size = 0
        while (request := await incoming.next(between=first is None)) is not None:
            if first is None:
                first = request
            elif (request.token, request.frame) != (first.token, first.frame) or request.records:
                raise InvalidRequestError("A frame was cut off by the next one.")
            pieces.append(request.payload)
            size += len(request.payload)
            if size > self._most:
                raise TooLargeError(f"A frame has more than {self._most} bytes.")
            if request.more:
                continue
            payload = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            yield _Assembled(first.token, first.frame, first.records, payload)
            first, pieces, size = None, [], 0
        if first is not None:
            raise InvalidRequestError("The stream ended inside a frame.")

    def _begin(self, frame: _Assembled) -> "asyncio.Task[Answer]":
        task = asyncio.create_task(self._append(frame))

        def ended(_task: object) -> None:
            # Not by the task itself: one that is cancelled before it begins never runs.
            self._budget.give(len(frame.payload))

        task.add_done_callback(ended)
        return task

    async def _append(self, frame: _Assembled) -> Answer:
        recorded = await self._record(frame)
        return Answer(frame=frame.number, accepted=recorded.accepted, sealed=recorded.sealed)

    async def _record(self, frame: _Assembled) -> Recorded:
        records = results_repo.parse(frame.records, frame.payload)
        ticket = await self.ticket(frame.token)
        if ticket is None:
            return Recorded(sealed=True)
        blob = None
        if len(frame.payload) >= results_repo.INLINE_BYTES:
            blob = await self._put(ticket, frame.payload)
        whole = Frame(
            ticket=ticket, records=records, payload=None if blob else frame.payload, blob=blob
        )
        try:
            return await self.record(whole)
        except BaseException:
            if blob is not None:
                receiving.give_up(self._context, [blob])
            raise

    async def _put(self, ticket: Ticket, payload: bytes) -> str:
        project_id = ProjectId(ticket.project_id)
        name = self._context.blob_name(project_id, "segment")
        now_ms = self._context.now_ms()
        await self._context.db.write(
            "result.announce",
            lambda connection: blobs_repo.announce(connection, [name], project_id, now_ms),
        )
        try:
            await self._context.blobs.put("result.write", name, payload)
        except BaseException:
            receiving.give_up(self._context, [name])
            raise
        return name

    async def record(self, frame: Frame) -> Recorded:
        """Record one frame and wake who waits for what it changed."""
        recorded = await self._context.db.write(
            "result.record",
            lambda connection: results_repo.record(
                connection, frame, now_ms=self._context.now_ms(), lease_ms=self._lease_ms
            ),
        )
        if recorded.accepted:
            self._context.wake("events")
        if recorded.finished:
            self._context.wake("finalizer")
            self._context.wake("outbox")
        return recorded

    async def ticket(self, token: str) -> Ticket | None:
        """Return what a token stands for; None when its batch has ended and was cleared."""
        found = self._tickets.get(token)
        if found is None:
            found = await self._context.db.read(
                lambda connection: attempts_repo.ticket(connection, token)
            )
            if found is not None:
                self.remember(found)
        return found

    def remember(self, ticket: Ticket) -> None:
        """Keep a ticket, so that its frames need no look-up; the oldest is forgotten."""
        self._tickets[ticket.token] = ticket
        if len(self._tickets) > _TICKETS:
            self._tickets.popitem(last=False)


def _abandon(task: "asyncio.Task[Any]") -> None:
    """Stop a task whose outcome nobody waits for; a commit that runs is not undone by it."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    task.cancel()
