"""The gRPC services `Models` and `Admin`, in the store."""

import sqlalchemy as sa

from protos.nightshift.v1 import admin_pb2, models_pb2, models_pb2_grpc
from services.kit.calls.interceptors import Call
from services.kit.wire.errors import InvalidRequestError
from services.store.admin import models_repo
from services.store.admin.audit import record
from services.store.admin.keys_servicer import KeyAdmin
from services.store.admin.projects_servicer import ProjectAdmin
from services.store.context import Context

_MAX_NAME = 512


class ModelsServicer(models_pb2_grpc.ModelsServicer):
    """Reads models."""

    def __init__(self, context: Context) -> None:
        """Serve the models of `context`."""
        self._context = context

    async def ListModels(
        self, request: models_pb2.ListModelsRequest, context: Call
    ) -> models_pb2.ListModelsResponse:
        """See models.proto."""
        rows = await self._context.db.read(models_repo.list_all)
        return models_pb2.ListModelsResponse(models=[models_repo.to_proto(row) for row in rows])

    async def GetModel(
        self, request: models_pb2.GetModelRequest, context: Call
    ) -> models_pb2.GetModelResponse:
        """See models.proto."""
        row = await self._context.db.read(
            lambda connection: models_repo.get(connection, request.model_id)
        )
        return models_pb2.GetModelResponse(model=models_repo.to_proto(row))


class AdminServicer(KeyAdmin, ProjectAdmin):
    """Changes models; keys and projects are its parents'."""

    def __init__(self, context: Context) -> None:
        """Change the models, keys and projects of `context`."""
        self._context = context

    async def PutModels(
        self, request: admin_pb2.PutModelsRequest, context: Call
    ) -> admin_pb2.PutModelsResponse:
        """See admin.proto."""
        now_at = self._context.now_ms() // 1000
        for model in request.models:
            if not 0 < len(model.id) <= _MAX_NAME or not model.pool_id:
                raise InvalidRequestError(
                    f"A model needs a name of 1 to {_MAX_NAME} characters and a pool."
                )

        def put(connection: sa.Connection) -> list[models_repo.Row]:
            for model in request.models:
                models_repo.put_pool(connection, model.pool_id, now_at)
                models_repo.put_model(
                    connection,
                    name=model.id,
                    pool_id=model.pool_id,
                    endpoints=model.endpoints,
                    context_length=(
                        model.context_length if model.HasField("context_length") else None
                    ),
                    now_at=now_at,
                )
            return models_repo.list_all(connection)

        rows = await self._context.db.write("models.put", put)
        record(context, "models_put", models=[model.id for model in request.models])
        return admin_pb2.PutModelsResponse(models=[models_repo.to_proto(row) for row in rows])

    async def DeleteModel(
        self, request: admin_pb2.DeleteModelRequest, context: Call
    ) -> admin_pb2.DeleteModelResponse:
        """See admin.proto."""
        await self._context.db.write(
            "models.delete", lambda connection: models_repo.delete(connection, request.model_id)
        )
        record(context, "model_deleted", model=request.model_id)
        return admin_pb2.DeleteModelResponse(model_id=request.model_id)
