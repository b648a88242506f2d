"""/v1/usage: what the caller's project has used, by key. An extension of ours."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protos.nightshift.v1 import batches_pb2
from services.gateway.auth import Caller
from services.gateway.context import Context
from services.gateway.rest.envelope import JsonResponse
from services.gateway.rest.routes.resource import resource
from services.gateway.rest.translate import project_usage_object


class UsageRoutes:
    """Routes of usage."""

    def __init__(self, context: Context) -> None:
        """Sum the batches of `context`'s store."""
        self._context = context
        self._store = context.store

    def routes(self) -> list[Route]:
        """Return the routes."""
        return resource(self._context, "/v1/usage", {"GET": self.get})

    async def get(self, _request: Request, caller: Caller) -> Response:
        """Sum the project's batches; running ones count as far as they are."""
        answer = await self._store.call(
            self._store.batches.GetUsage, batches_pb2.GetUsageRequest(), caller
        )
        return JsonResponse(project_usage_object(answer))
