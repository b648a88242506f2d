"""/v1/models: the names that users may ask for, whether or not an executor is alive."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protos.nightshift.v1 import models_pb2
from services.gateway.auth import Caller
from services.gateway.context import Context
from services.gateway.rest.envelope import JsonResponse
from services.gateway.rest.routes.resource import resource
from services.gateway.rest.translate import model_object


class ModelRoutes:
    """Routes of models."""

    def __init__(self, context: Context) -> None:
        """Serve the models of `context`'s store."""
        self._context = context
        self._store = context.store

    def routes(self) -> list[Route]:
        """Return the routes; a model's name may hold slashes."""
        return [
            *resource(self._context, "/v1/models", {"GET": self.list}),
            *resource(self._context, "/v1/models/{model_id:path}", {"GET": self.get}),
        ]

    async def list(self, _request: Request, caller: Caller) -> Response:
        """List all models; this list is not paged."""
        answer = await self._store.call(
            self._store.models.ListModels, models_pb2.ListModelsRequest(), caller
        )
        data = [model_object(model) for model in answer.models]
        return JsonResponse({"object": "list", "data": data})

    async def get(self, request: Request, caller: Caller) -> Response:
        """Read one model."""
        model_id = request.path_params["model_id"].removesuffix("/")
        answer = await self._store.call(
            self._store.models.GetModel, models_pb2.GetModelRequest(model_id=model_id), caller
        )
        return JsonResponse(model_object(answer.model))
