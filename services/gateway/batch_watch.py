"""A batch's events for one client: asked of the store page by page, no faster than they are taken.

Nothing is read ahead, so that a client that takes nothing costs no more than a page, and a store
that is started again is simply asked again.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Final

import prometheus_client

from protos.nightshift.v1 import events_pb2
from services.gateway.auth import Caller
from services.gateway.shares import Shares
from services.gateway.store import Store
from services.kit.wire.errors import UnavailableError

HEARTBEAT_SECONDS: Final = 15.0
"""Something is sent at least this often, so that proxies and clients see that the stream lives."""

AWAY_SECONDS: Final = 60.0
"""A store that is away for so long ends the stream; the client goes on after its last event."""

MAX_WATCHERS: Final = 512
"""Streams at once; each holds a page of at most 256 KiB and its copy on the way out."""

_RETRY_SECONDS: Final = 0.5
# With room for the answer to travel before the heartbeat is due.
_WAIT_MS: Final = 14_000

Page = events_pb2.ReadBatchEventsResponse

HEARTBEAT: Final = Page()
"""A page without events: nothing happened, and the stream lives."""

_WATCHERS = prometheus_client.Gauge(
    "nightshift_gateway_event_streams", "Clients that follow a batch."
)


class Watchers:
    """All streams of a gateway: how many there are, and whether they are to end."""

    def __init__(self) -> None:
        """Have none."""
        self._streams = Shares(MAX_WATCHERS)
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """End all streams; each client goes on elsewhere after its last event."""
        self._draining.set()

    @property
    def draining(self) -> asyncio.Event:
        """Set when all streams are to end."""
        return self._draining

    @contextlib.contextmanager
    def one_more(self, caller: Caller) -> Iterator[None]:
        """Count a stream while it lasts.

        Raises:
            RateLimitedError: the caller has its share of them.
            UnavailableError: there are too many.
        """
        with (
            self._streams.held(caller, "streams of events", retry_seconds=5.0),
            _WATCHERS.track_inprogress(),
        ):
            yield


class BatchWatch:
    """What one client follows."""

    def __init__(
        self,
        store: Store,
        watchers: Watchers,
        caller: Caller,
        wanted: events_pb2.WatchBatchRequest,
        check: Callable[[], Awaitable[object]],
    ) -> None:
        """Follow nothing yet.

        Args:
            store: is asked.
            watchers: counts the stream.
            caller: who follows.
            wanted: what, and from where on.
            check: raises once the caller may not go on; called at each heartbeat.
        """
        self._store = store
        self._watchers = watchers
        self._caller = caller
        self._wanted = wanted
        self._check = check

    async def pages(self) -> AsyncGenerator[Page, None]:
        """Yield pages until one has ended, or early when the gateway drains; `HEARTBEAT` between.

        Raises:
            NotFoundError: no such batch in this project; as the other refusals, before any page.
            InvalidRequestError: it has no such event.
            UnavailableError: the store does not answer.
        """
        with self._watchers.one_more(self._caller):
            draining = asyncio.create_task(self._watchers.draining.wait())
            try:
                async with contextlib.aclosing(self._pages(draining)) as pages:
                    async for page in pages:
                        yield page
            finally:
                draining.cancel()

    async def _pages(self, draining: "asyncio.Task[bool]") -> AsyncGenerator[Page, None]:
        wait_ms = 0
        loop = asyncio.get_running_loop()
        answered = checked = loop.time()
        while not draining.done():
            reading = asyncio.create_task(self._read(wait_ms))
            try:
                while not reading.done():
                    await asyncio.wait(
                        {reading, draining},
                        timeout=HEARTBEAT_SECONDS,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    if draining.done():
                        return
                    if not reading.done():
                        yield HEARTBEAT
                page = reading.result()
            except UnavailableError:
                if wait_ms == 0 or loop.time() - answered > AWAY_SECONDS:
                    raise
                await asyncio.wait({draining}, timeout=_RETRY_SECONDS)
                page = HEARTBEAT
            else:
                answered = loop.time()
                self._wanted.after = page.next
                wait_ms = _WAIT_MS
            finally:
                reading.cancel()
            if loop.time() - checked >= HEARTBEAT_SECONDS:
                with contextlib.suppress(UnavailableError):
                    await self._check()
                checked = loop.time()
            yield page
            if page.ended:
                return

    async def _read(self, wait_ms: int) -> Page:
        request = events_pb2.ReadBatchEventsRequest(watch=self._wanted, wait_ms=wait_ms)
        return await self._store.call(self._store.events.ReadBatchEvents, request, self._caller)
