"""Calls to the store that operators' commands make, with the services' secret."""

import getpass
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from protos.nightshift.v1 import admin_pb2, admin_pb2_grpc, batches_pb2, models_pb2
from services.kit.calls import rpc
from services.kit.wire.errors import from_rpc_error
from services.kit.wire.ids import pool_id_of

T = TypeVar("T")


class Store(Protocol):
    """Where a store answers, and the services' secret that it wants to see."""

    @property
    def address(self) -> str:
        """Return `host:port`."""
        ...

    @property
    def secret(self) -> str:
        """Return the secret."""
        ...


async def put_models(store: str, secret: str, names: Sequence[str]) -> None:
    """Write each name as a model with a pool of its own; waits for the store to listen.

    Raises:
        NightshiftError: the store refused, or did not answer within the call's deadline.
    """
    models = [models_pb2.Model(id=name, pool_id=pool_id_of(name)) for name in names]
    async with rpc.open_channel(store) as channel:
        try:
            await admin_pb2_grpc.AdminStub(channel).PutModels(
                admin_pb2.PutModelsRequest(models=models), metadata=_metadata(secret)
            )
        except rpc.CallFault as failure:
            raise from_rpc_error(failure) from failure


async def delete_model(store: Store, name: str) -> None:
    """Remove a model's name.

    Raises:
        NightshiftError: no such model, or the store cannot be reached.
    """
    request = admin_pb2.DeleteModelRequest(model_id=name)
    await _ask(store, lambda stub, metadata: stub.DeleteModel(request, metadata=metadata))


async def create_key(
    store: Store, request: admin_pb2.CreateKeyRequest
) -> admin_pb2.CreateKeyResponse:
    """Make a key; the answer alone holds it.

    Raises:
        NightshiftError: the store refused, or cannot be reached.
    """
    return await _ask(store, lambda stub, metadata: stub.CreateKey(request, metadata=metadata))


async def list_keys(store: Store, project_id: str) -> Sequence[admin_pb2.ApiKey]:
    """Return the keys of a project, or of all where it is empty.

    Raises:
        NightshiftError: the store cannot be reached.
    """
    request = admin_pb2.ListKeysRequest(project_id=project_id)
    answer: admin_pb2.ListKeysResponse = await _ask(
        store, lambda stub, metadata: stub.ListKeys(request, metadata=metadata)
    )
    return answer.keys


async def revoke_key(store: Store, key_id: str, project_id: str) -> admin_pb2.ApiKey:
    """End a key, where it is of that project or none is named.

    Raises:
        NightshiftError: no such key, or the store cannot be reached.
    """
    request = admin_pb2.RevokeKeyRequest(key_id=key_id, project_id=project_id)
    answer: admin_pb2.RevokeKeyResponse = await _ask(
        store, lambda stub, metadata: stub.RevokeKey(request, metadata=metadata)
    )
    return answer.key


async def are_keys_needed(store: Store) -> bool:
    """Tell whether any key was ever made.

    Raises:
        NightshiftError: the store cannot be reached.
    """
    request = admin_pb2.LookUpKeyRequest()
    answer: admin_pb2.LookUpKeyResponse = await _ask(
        store, lambda stub, metadata: stub.LookUpKey(request, metadata=metadata)
    )
    return answer.keys_needed


async def list_usage(store: Store, project_id: str) -> Sequence[batches_pb2.KeyUsage]:
    """Return what a project has used by key, or all where it is empty.

    Raises:
        NightshiftError: the store cannot be reached.
    """
    request = admin_pb2.ListUsageRequest(project_id=project_id)
    answer: admin_pb2.ListUsageResponse = await _ask(
        store, lambda stub, metadata: stub.ListUsage(request, metadata=metadata)
    )
    return answer.by_key


async def list_projects(store: Store, project_id: str) -> Sequence[admin_pb2.Project]:
    """Return one project, or all of them where none is named, by name.

    Raises:
        NightshiftError: the store cannot be reached.
    """
    found: list[admin_pb2.Project] = []
    while True:
        request = admin_pb2.ListProjectsRequest(
            project_id=project_id, after=found[-1].id if found else ""
        )
        answer: admin_pb2.ListProjectsResponse = await _ask(
            store,
            lambda stub, metadata, request=request: stub.ListProjects(request, metadata=metadata),  # type: ignore[misc]  # bound now
        )
        found += answer.projects
        if not answer.has_more:
            return found


async def set_quota(store: Store, project_id: str, quota_bytes: int | None) -> admin_pb2.Project:
    """Give a project a quota of its own, 0 for no limit; None means the store's setting again.

    Raises:
        NightshiftError: no such project, or the store cannot be reached.
    """
    request = admin_pb2.SetProjectQuotaRequest(project_id=project_id, quota_bytes=quota_bytes)
    answer: admin_pb2.SetProjectQuotaResponse = await _ask(
        store, lambda stub, metadata: stub.SetProjectQuota(request, metadata=metadata)
    )
    return answer.project


async def _ask(store: Store, call: Callable[[Any, Any], Awaitable[T]]) -> T:
    async with rpc.open_channel(store.address) as channel:
        try:
            return await call(admin_pb2_grpc.AdminStub(channel), _metadata(store.secret))
        except rpc.CallFault as failure:
            raise from_rpc_error(failure) from failure


def _metadata(secret: str) -> tuple[tuple[str, str], ...]:
    """Return what each call carries: the secret, and who asks, for the store's log."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        # A container's user may have a number only.
        user = str(os.getuid())
    operator = f"{user}@{socket.gethostname()}"
    # Metadata is ASCII.
    return rpc.metadata(secret, operator=operator.encode("ascii", "replace").decode())
