"""/v1/batches: create, get, list, cancel."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protos.nightshift.v1 import batches_pb2, common_pb2
from services.gateway import checks
from services.gateway.auth import Caller
from services.gateway.context import Context
from services.gateway.rest.envelope import JsonResponse, list_object
from services.gateway.rest.routes.resource import read_body, resource, with_idempotency_key
from services.gateway.rest.translate import batch_object

DEFAULT_LIMIT: Final = 20
"""Batches of a page for which no limit is asked."""

_PAGE: Final = 25
"""Batches of one answer of the store: metadata and faults of more could exceed a gRPC message."""


class BatchRoutes:
    """Routes of batches."""

    def __init__(self, context: Context) -> None:
        """Serve the batches of `context`'s store."""
        self._context = context
        self._store = context.store

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            *resource(self._context, "/v1/batches", {"GET": self.list, "POST": self.create}),
            *resource(self._context, "/v1/batches/{batch_id}", {"GET": self.get}),
            *resource(self._context, "/v1/batches/{batch_id}/cancel", {"POST": self.cancel}),
        ]

    async def create(self, request: Request, caller: Caller) -> Response:
        """Create a batch."""
        caller = with_idempotency_key(request, caller)
        wanted = checks.parse_create_batch(await read_body(request))
        checks.check_create_batch(wanted, self._context.windows)
        answer = await self._store.call(self._store.batches.CreateBatch, wanted, caller)
        return JsonResponse(batch_object(answer.batch))

    async def get(self, request: Request, caller: Caller) -> Response:
        """Read one batch."""
        batch_id = checks.batch_id_of(request.path_params["batch_id"])
        answer = await self._store.call(
            self._store.batches.GetBatch, batches_pb2.GetBatchRequest(batch_id=batch_id), caller
        )
        return JsonResponse(batch_object(answer.batch))

    async def list(self, request: Request, caller: Caller) -> Response:
        """List batches, newest first."""
        query = request.query_params
        left = checks.limit_of(query, default=DEFAULT_LIMIT, maximum=checks.MAX_BATCHES_LIMIT)
        after = query.get("after", "")
        if after:
            checks.batch_id_of(after, param="after")
        items: list[dict[str, Any]] = []
        has_more = True
        while left > 0 and has_more:
            page = common_pb2.PageRequest(after=after, limit=min(left, _PAGE))
            answer = await self._store.call(
                self._store.batches.ListBatches, batches_pb2.ListBatchesRequest(page=page), caller
            )
            items += map(batch_object, answer.batches)
            has_more = answer.has_more
            if not answer.batches:
                break
            left -= len(answer.batches)
            after = answer.batches[-1].id
        return JsonResponse(list_object(items, has_more=has_more))

    async def cancel(self, request: Request, caller: Caller) -> Response:
        """Cancel a batch; the body is not read, since clients send none or anything."""
        batch_id = checks.batch_id_of(request.path_params["batch_id"])
        answer = await self._store.call(
            self._store.batches.CancelBatch,
            batches_pb2.CancelBatchRequest(batch_id=batch_id),
            caller,
        )
        return JsonResponse(batch_object(answer.batch))
