"""/v1/batches/{id}/events: what happens to a batch, while it happens."""

import asyncio
import contextlib
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from protos.nightshift.v1 import events_pb2
from services.gateway import checks
from services.gateway.auth import Caller
from services.gateway.batch_watch import BatchWatch
from services.gateway.context import Context
from services.gateway.rest.download import SEND_SECONDS
from services.gateway.rest.routes.resource import resource
from services.gateway.rest.sse import OPENING, SseWriter
from services.gateway.rest.translate import batch_object
from services.kit.wire.errors import InternalError

_RESULTS: Final = "results"
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Proxies of nginx's kind would collect events before they pass them on.
    (b"x-accel-buffering", b"no"),
]


class EventRoutes:
    """Routes of events."""

    def __init__(self, context: Context) -> None:
        """Serve the batches of `context`'s store."""
        self._context = context

    def routes(self) -> list[Route]:
        """Return the routes."""
        return resource(self._context, "/v1/batches/{batch_id}/events", {"GET": self.watch})

    async def watch(self, request: Request, caller: Caller) -> Response:
        """Follow a batch to its end."""
        query = request.query_params
        include = [*query.getlist("include"), *query.getlist("include[]")]
        for name in include:
            checks.check_value("include", name, (_RESULTS,))
        wanted = events_pb2.WatchBatchRequest(
            batch_id=checks.batch_id_of(request.path_params["batch_id"]),
            include_results=_RESULTS in include,
            # A client that goes on by itself repeats the URL, with what it began after.
            after=request.headers.get("last-event-id") or query.get("after", ""),
        )
        authorization, client = request.headers.get("authorization", ""), caller.client

        async def check() -> None:
            await self._context.auth.authenticate(authorization, client)

        context = self._context
        return EventStream(BatchWatch(context.store, context.watchers, caller, wanted, check))


class EventStream(Response):
    """Answers with events until the last one, or until the client has gone."""

    def __init__(self, watch: BatchWatch) -> None:
        """Follow `watch`."""
        super().__init__()
        self._watch = watch
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; a client that goes away ends what is done for it."""
        sending = asyncio.create_task(self._send(scope, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    async def _send(self, scope: Scope, send: Send) -> None:
        writer = SseWriter(batch_object)
        async with contextlib.aclosing(self._watch.pages()) as pages:
            async for page in pages:
                text = writer.text(page)
                if not self._started:
                    # Not earlier, since the first page may be a refusal.
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    text = OPENING + text
                if scope["method"] == "HEAD":
                    break
                await _write(send, text)
        await send({"type": "http.response.body"})


async def _write(send: Send, text: bytes) -> None:
    if not text:
        return
    try:
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.body", "body": text, "more_body": True})
    except TimeoutError:
        raise InternalError("The client took nothing for too long.") from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
