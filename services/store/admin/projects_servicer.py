"""The part of the gRPC service `Admin` that is about projects and their quotas, in the store."""

import sqlalchemy as sa

from protos.nightshift.v1 import admin_pb2, admin_pb2_grpc
from services.kit.calls.interceptors import Call
from services.store.admin import quota_repo
from services.store.admin.audit import record
from services.store.context import Context


class ProjectAdmin(admin_pb2_grpc.AdminServicer):
    """Lists projects and sets their quotas."""

    _context: Context

    async def ListProjects(
        self, request: admin_pb2.ListProjectsRequest, context: Call
    ) -> admin_pb2.ListProjectsResponse:
        """See admin.proto."""

        def look(connection: sa.Connection) -> list[admin_pb2.Project]:
            rows = quota_repo.list_page(connection, request.after, request.project_id)
            return [self._project(connection, row) for row in rows]

        found = await self._context.db.read(look)
        return admin_pb2.ListProjectsResponse(
            projects=found[: quota_repo.MOST_PROJECTS],
            has_more=len(found) > quota_repo.MOST_PROJECTS,
        )

    async def SetProjectQuota(
        self, request: admin_pb2.SetProjectQuotaRequest, context: Call
    ) -> admin_pb2.SetProjectQuotaResponse:
        """See admin.proto."""
        own = request.quota_bytes if request.HasField("quota_bytes") else None

        def change(connection: sa.Connection) -> admin_pb2.Project:
            quota_repo.set_quota(connection, request.project_id, own)
            (row,) = quota_repo.list_page(connection, "", request.project_id)
            return self._project(connection, row)

        changed = await self._context.db.write("project.set_quota", change)
        record(context, "quota_set", of_project=request.project_id, quota_bytes=own)
        return admin_pb2.SetProjectQuotaResponse(project=changed)

    def _project(self, connection: sa.Connection, row: quota_repo.Row) -> admin_pb2.Project:
        default = self._context.settings.project_quota_bytes
        limit = default if row.quota_bytes is None else row.quota_bytes
        return admin_pb2.Project(
            id=row.id,
            created_at=row.created_at,
            used_bytes=quota_repo.used(connection, row.id, self._context.now_ms() // 1000),
            quota_bytes=row.quota_bytes,
            limit_bytes=limit or None,
        )
