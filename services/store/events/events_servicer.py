"""The gRPC service `Events`, in the store: pages of a batch's events, waited for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

from protos.nightshift.v1 import events_pb2, events_pb2_grpc
from services.kit.calls.interceptors import Call, project_of
from services.kit.wire.errors import InvalidRequestError
from services.store.batches.batches_servicer import to_proto
from services.store.context import Context
from services.store.events.event_hub import EventHub
from services.store.events.event_reader import EventReader, Page, Watch
from services.store.events.shared_reads import KEPT_SECONDS

MOST_WAIT_MS: Final = 20_000
"""Below the deadline of a call, with time left to answer."""
_SEARCH_SECONDS: Final = 5.0


class EventsServicer(events_pb2_grpc.EventsServicer):
    """Thin: messages in, pages out."""

    def __init__(self, context: Context, hub: EventHub) -> None:
        """Serve the batches of `context`, woken by `hub`."""
        self._context = context
        self._hub = hub
        self._reader = EventReader(context)

    async def ReadBatchEvents(
        self, request: events_pb2.ReadBatchEventsRequest, context: Call
    ) -> events_pb2.ReadBatchEventsResponse:
        """See events.proto."""
        if not 0 <= request.wait_ms <= MOST_WAIT_MS:
            raise InvalidRequestError(
                f"A call waits 0 to {MOST_WAIT_MS} milliseconds.", param="wait_ms"
            )
        page = await self._page(_watch_of(request.watch, context), request.wait_ms / 1000)
        return events_pb2.ReadBatchEventsResponse(
            events=_events(page), next=page.next, ended=page.ended
        )

    async def WatchBatch(
        self, request: events_pb2.WatchBatchRequest, context: Call
    ) -> AsyncIterator[events_pb2.WatchBatchResponse]:
        """See events.proto; ends early when the store stops."""
        watch = _watch_of(request, context)
        wait_seconds = 0.0
        while not self._hub.closed:
            page = await self._page(watch, wait_seconds)
            wait_seconds = MOST_WAIT_MS / 1000
            for event in _events(page):
                yield event
            if page.ended:
                return
            watch = replace(watch, after=page.next)

    async def _page(self, watch: Watch, wait_seconds: float) -> Page:
        """Return the next page, an empty one when nothing happened in time."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        until = since + wait_seconds
        if wait_seconds:
            since = await self._turn(watch, until)
        while True:
            page = await self._reader.page(watch, since)
            if page.empty and page.next != watch.after and loop.time() < until + _SEARCH_SECONDS:
                # It looked at lines that are not to be told, and there may be others.
                watch = replace(watch, after=page.next)
                continue
            if not page.empty or self._hub.closed or loop.time() >= until:
                return page
            await self._changed(page, until)
            since = max(self._hub.looked, await self._turn(watch, until))

    async def _turn(self, watch: Watch, until: float) -> float:
        """Wait for a turn, but no longer than `until`; return since when a read is good enough.

        What such a read has missed the hub's next look finds.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._hub.turn(watch.project_id)
        return asyncio.get_running_loop().time() - KEPT_SECONDS

    async def _changed(self, page: Page, until: float) -> None:
        with self._hub.watching(page.batch.id, page.batch.version) as changed:
            # Of what was committed since the page was read, the hub's last look may know nothing.
            self._context.wake("events")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await changed.wait()


def _watch_of(request: events_pb2.WatchBatchRequest, context: Call) -> Watch:
    return Watch(
        batch_id=request.batch_id,
        project_id=project_of(context),
        include_results=request.include_results,
        after=request.after,
    )


def _events(page: Page) -> list[events_pb2.WatchBatchResponse]:
    events = []
    if page.reset:
        events.append(
            events_pb2.WatchBatchResponse(reset=events_pb2.ResetEvent(event_id=page.reset))
        )
    if page.lines:
        results = events_pb2.ResultLinesEvent(lines=page.lines, event_ids=page.ids)
        events.append(events_pb2.WatchBatchResponse(results=results))
    if page.state:
        state = events_pb2.BatchStateEvent(
            event_id=str(page.batch.version), batch=to_proto(page.batch, page.explanation)
        )
        events.append(events_pb2.WatchBatchResponse(state=state))
    return events
