"""The part of the gRPC service `Admin` that is about API keys and what they used, in the store."""

import hashlib
import secrets
from typing import Final

from protos.nightshift.v1 import admin_pb2, admin_pb2_grpc
from services.kit.calls.interceptors import Call
from services.kit.wire import api_keys
from services.kit.wire.errors import InvalidRequestError
from services.store.admin import keys_repo, usage_repo
from services.store.admin.audit import record
from services.store.context import Context

_KEY_BYTES: Final = 32
_PREFIX_CHARACTERS: Final = 7


class KeyAdmin(admin_pb2_grpc.AdminServicer):
    """Makes, lists, ends and looks up keys."""

    _context: Context

    async def CreateKey(
        self, request: admin_pb2.CreateKeyRequest, context: Call
    ) -> admin_pb2.CreateKeyResponse:
        """See admin.proto."""
        keys_repo.check_new(request)
        secret = api_keys.new_key(secrets.token_bytes(_KEY_BYTES))
        key = keys_repo.NewKey(
            id=f"key_{self._context.new_id()}",
            project_id=keys_repo.project_of(request.project_id),
            name=request.name,
            sha256=hashlib.sha256(secret.encode()).hexdigest(),
            prefix=secret[:_PREFIX_CHARACTERS],
            last_four=secret[-4:],
            requests_per_minute=(
                request.requests_per_minute if request.HasField("requests_per_minute") else None
            ),
        )
        now_at = self._context.now_ms() // 1000
        row = await self._context.db.write(
            "key.create", lambda connection: keys_repo.insert(connection, key, now_at)
        )
        record(context, "key_made", of_project=key.project_id, made=key.id)
        return admin_pb2.CreateKeyResponse(key=keys_repo.to_proto(row), secret=secret)

    async def ListKeys(
        self, request: admin_pb2.ListKeysRequest, context: Call
    ) -> admin_pb2.ListKeysResponse:
        """See admin.proto."""
        rows = await self._context.db.read(
            lambda connection: keys_repo.list_all(connection, request.project_id)
        )
        return admin_pb2.ListKeysResponse(keys=[keys_repo.to_proto(row) for row in rows])

    async def RevokeKey(
        self, request: admin_pb2.RevokeKeyRequest, context: Call
    ) -> admin_pb2.RevokeKeyResponse:
        """See admin.proto."""
        now_at = self._context.now_ms() // 1000
        row = await self._context.db.write(
            "key.revoke",
            lambda connection: keys_repo.revoke(
                connection, request.key_id, request.project_id, now_at
            ),
        )
        record(context, "key_revoked", of_project=row.project_id, revoked=row.id)
        return admin_pb2.RevokeKeyResponse(key=keys_repo.to_proto(row))

    async def LookUpKey(
        self, request: admin_pb2.LookUpKeyRequest, context: Call
    ) -> admin_pb2.LookUpKeyResponse:
        """See admin.proto."""
        if len(request.sha256) not in (0, 32):
            raise InvalidRequestError("A key is looked up by its SHA-256.")
        if not request.sha256:
            made, old = await self._context.db.read(keys_repo.summary)
            return admin_pb2.LookUpKeyResponse(
                keys_needed=made, all_have_checksums=made and not old
            )
        needed, row = await self._context.db.read(
            lambda connection: keys_repo.look_up(connection, request.sha256.hex())
        )
        return admin_pb2.LookUpKeyResponse(
            keys_needed=needed, key=None if row is None else keys_repo.to_proto(row)
        )

    async def ListUsage(
        self, request: admin_pb2.ListUsageRequest, context: Call
    ) -> admin_pb2.ListUsageResponse:
        """See admin.proto."""
        async with self._context.summing:
            by_key = await self._context.db.read(
                lambda connection: usage_repo.by_key(connection, request.project_id)
            )
        return admin_pb2.ListUsageResponse(by_key=by_key)
