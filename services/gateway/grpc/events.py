"""The public gRPC service `Events`: what the route of the same name tells."""

import asyncio
import contextlib

from protos.nightshift.v1 import events_pb2, events_pb2_grpc
from services.gateway import checks
from services.gateway.batch_watch import BatchWatch
from services.gateway.grpc.call import Servicer
from services.gateway.rest.download import SEND_SECONDS
from services.kit.calls.interceptors import Call, metadata_value
from services.kit.wire.errors import InternalError, UnavailableError


class EventsServicer(Servicer, events_pb2_grpc.EventsServicer):
    """Events, page by page from the store."""

    # Writes by itself rather than yielding, so that a client that takes nothing can be given up.
    async def WatchBatch(  # type: ignore[override]
        self, request: events_pb2.WatchBatchRequest, context: Call
    ) -> None:
        """See events.proto; UNAVAILABLE when it ends before the batch does: watch again."""
        checks.batch_id_of(request.batch_id)
        authorization = metadata_value(context, "authorization")
        client = self._caller().client

        async def check() -> None:
            await self._context.auth.authenticate(authorization, client)

        watch = BatchWatch(self._store, self._context.watchers, self._caller(), request, check)
        async with contextlib.aclosing(watch.pages()) as pages:
            async for page in pages:
                for event in page.events:
                    await _write(context, event)
                if page.ended:
                    return
        raise UnavailableError(
            "This server stops; watch again after the last event.", retry_after_seconds=1.0
        )

    async def ReadBatchEvents(
        self, request: events_pb2.ReadBatchEventsRequest, context: Call
    ) -> events_pb2.ReadBatchEventsResponse:
        """See events.proto."""
        checks.batch_id_of(request.watch.batch_id)
        return await self._store.call(self._store.events.ReadBatchEvents, request, self._caller())


async def _write(context: Call, event: events_pb2.WatchBatchResponse) -> None:
    try:
        async with asyncio.timeout(SEND_SECONDS):
            await context.write(event)
    except TimeoutError:
        raise InternalError("The client took nothing for too long.") from None
