"""Calls to the store that operators' commands make, with the services' secret."""

from collections.abc import Sequence

from protos.nightshift.v1 import admin_pb2, admin_pb2_grpc, models_pb2
from services.kit import rpc
from services.kit.errors import from_rpc_error
from services.kit.ids import pool_id_of


async def put_models(store: str, secret: str, names: Sequence[str]) -> None:
    """Write each name as a model with a pool of its own; waits for the store to listen.

    Raises:
        NightshiftError: the store refused, or did not answer within the call's deadline.
    """
    models = [models_pb2.Model(id=name, pool_id=pool_id_of(name)) for name in names]
    async with rpc.open_channel(store) as channel:
        try:
            await admin_pb2_grpc.AdminStub(channel).PutModels(
                admin_pb2.PutModelsRequest(models=models), metadata=rpc.metadata(secret)
            )
        except rpc.CallFault as failure:
            raise from_rpc_error(failure) from failure


async def delete_model(store: str, secret: str, name: str) -> None:
    """Remove a model's name.

    Raises:
        NightshiftError: no such model, or the store cannot be reached.
    """
    async with rpc.open_channel(store) as channel:
        try:
            await admin_pb2_grpc.AdminStub(channel).DeleteModel(
                admin_pb2.DeleteModelRequest(model_id=name), metadata=rpc.metadata(secret)
            )
        except rpc.CallFault as failure:
            raise from_rpc_error(failure) from failure
