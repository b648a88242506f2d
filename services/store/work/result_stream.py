"""Receives result frames: made durable in groups, acknowledged in order.

A result that is longer than a message comes in pieces, which go to its blob as they come: memory is
that of a piece, and of what the blob's place takes to write one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

from protos.nightshift.v1 import work_pb2
from services.kit.wire.errors import InvalidRequestError, UnavailableError
from services.kit.wire.ids import ProjectId
from services.store.blobs import blobs_repo
from services.store.blobs.base import Content
from services.store.context import Context
from services.store.files import intake
from services.store.work import attempts_repo, results_repo
from services.store.work.attempts_repo import Ticket
from services.store.work.results_repo import Frame, LongResult, Recorded

Request = work_pb2.AppendResultsRequest
Requests = AsyncIterator[Request]
Answer = work_pb2.AppendResultsResponse

FRAMES_IN_FLIGHT: Final = 16
"""Frames of one stream that may wait for their commit."""
BYTES_IN_FLIGHT: Final = 32 * 1024 * 1024
"""Payload bytes of all streams that may wait for their commit."""
LONG_AT_ONCE: Final = 4
"""Results in pieces that are received at a time, of all streams. A bucket takes 13 MiB for each."""
IDLE_SECONDS: Final = 60.0
"""A stream on which nothing comes for this long is ended."""
_TICKETS: Final = 10_000


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

    async def next(self, *, between: bool) -> Request | None:
        """Return the next request; `between` frames the end of the stream may be ours.

        Raises:
            UnavailableError: nothing came for too long, inside a frame.
        """
        if between and self._draining.is_set():
            return None
        try:
            async with asyncio.timeout(IDLE_SECONDS) as limit:
                self._waits_between = limit if between else None
                return await anext(self._requests)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            if not between:
                raise UnavailableError("A result stopped on its way; send it again.") from None
            # Ended in order: who has more to say opens the stream again.
            return None
        finally:
            self._waits_between = None

    async def pieces(self, first: Request, result: LongResult) -> AsyncGenerator[bytes, None]:
        """Yield the payload of a frame that begins with `first`.

        Raises:
            InvalidRequestError: it is cut off, or does not fit.
            UnavailableError: nothing more of it came for too long.
        """
        request = first
        while True:
            result.check(request.payload, more=request.more)
            yield request.payload
            if not request.more:
                return
            following = await self.next(between=False)
            if following is None:
                raise InvalidRequestError("The stream ended inside a frame.")
            if (following.token, following.frame) != (first.token, first.frame) or (
                following.records
            ):
                raise InvalidRequestError("A frame was cut off by the next one.")
            request = following

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
        self._most = context.settings.max_result_bytes
        self._budget = _Budget(BYTES_IN_FLIGHT)
        self._long = asyncio.Semaphore(LONG_AT_ONCE)
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()

    async def answers(self, requests: Requests) -> AsyncIterator[Answer]:
        """Yield an acknowledgement for each frame once it is durable, in the order of frames.

        Raises:
            InvalidRequestError: a frame does not fit; those before it are recorded.
            TooLargeError: a result is too long; likewise.
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
            while (request := await incoming.next(between=True)) is not None:
                if request.more:
                    await waiting.put(await self._begin_long(request, incoming))
                else:
                    await self._budget.take(len(request.payload))
                    await waiting.put(self._begin(request))
        finally:
            ending.cancel()
            # What was read is still answered; the reader's own failure comes after it.
            await waiting.put(None)

    def _begin(self, request: Request) -> "asyncio.Task[Answer]":
        task = asyncio.create_task(self._append(request))

        def ended(_task: object) -> None:
            # Not by the task itself: one that is cancelled before it begins never runs.
            self._budget.give(len(request.payload))

        task.add_done_callback(ended)
        return task

    async def _append(self, request: Request) -> Answer:
        records = results_repo.parse(request.records, request.payload, self._most)
        ticket = await self.ticket(request.token)
        if ticket is None:
            return Answer(frame=request.frame, sealed=True)
        payload: bytes | None = request.payload
        blob = None
        if len(request.payload) >= results_repo.INLINE_BYTES:
            payload, blob = None, await self._put(ticket, request.payload)
        frame = Frame(ticket=ticket, records=records, payload=payload, blob=blob)
        return await self._record(request.frame, frame)

    async def _begin_long(self, first: Request, incoming: _Incoming) -> "asyncio.Task[Answer]":
        """Receive a frame in pieces; the task records it."""
        result = LongResult(first.records, self._most)
        ticket = await self.ticket(first.token)
        async with self._long, aclosing(incoming.pieces(first, result)) as pieces:
            if ticket is None:
                async for _ in pieces:
                    pass
                return asyncio.create_task(_sealed(first.frame))
            blob = await self._put(ticket, pieces)
        frame = Frame(ticket=ticket, records=result.records, payload=None, blob=blob)
        return asyncio.create_task(self._record(first.frame, frame))

    async def _record(self, number: int, frame: Frame) -> Answer:
        try:
            recorded = await self.record(frame)
        except BaseException:
            if frame.blob is not None:
                intake.give_up(self._context, [frame.blob])
            raise
        return Answer(frame=number, accepted=recorded.accepted, sealed=recorded.sealed)

    async def _put(self, ticket: Ticket, payload: Content) -> str:
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
            intake.give_up(self._context, [name])
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


async def _sealed(number: int) -> Answer:
    return Answer(frame=number, sealed=True)


def _abandon(task: "asyncio.Task[Any]") -> None:
    """Stop a task whose outcome nobody waits for; a commit that runs is not undone by it."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    task.cancel()
