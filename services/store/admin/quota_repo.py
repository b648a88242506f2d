"""Statements on projects and on how many bytes their files may have together."""

from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from services.kit.wire.errors import InvalidRequestError, NotFoundError
from services.kit.wire.ids import ProjectId
from services.store.tables.core import HELD_WHERE, files, projects
from services.store.tables.uploads import PENDING_WHERE, uploads

Row = sa.Row[Any]

MOST_PROJECTS: Final = 1_000
"""Projects that one list shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What a project may keep.

    Attributes:
        project_id: whose it is.
        limit: bytes of all its files and of the parts of its pending uploads; None for no limit.
        used: bytes of them now; only known where there is a limit.
    """

    project_id: ProjectId
    limit: int | None
    used: int = 0

    def require(self, size: int, *, param: str) -> None:
        """Refuse `size` bytes more where they would be too many.

        Args:
            size: bytes that would be added.
            param: what of the request they come from.

        Raises:
            InvalidRequestError: they would; it names quota, use, and what to do.
        """
        if self.limit is None or self.used + size <= self.limit:
            return
        raise InvalidRequestError(
            f"Project '{self.project_id}' has a quota of {self.limit} bytes, its files have "
            f"{self.used}, and at least {size} would be added. Delete files or cancel uploads that "
            "are needed no more, or ask the operator for a larger quota (`nightshift projects "
            "set-quota`).",
            code="storage_quota_exceeded",
            param=param,
        )


def quota(connection: sa.Connection, project_id: ProjectId, default: int, now_at: int) -> Quota:
    """Return a project's quota and, where it has one, its use.

    Args:
        connection: in the transaction that adds to it, where the answer is to hold.
        project_id: whose.
        default: bytes where the project has none of its own; 0 means no limit.
        now_at: the store's time, Unix seconds.
    """
    own = connection.scalar(sa.select(projects.c.quota_bytes).where(projects.c.id == project_id))
    limit = default if own is None else int(own)
    if not limit:
        return Quota(project_id=project_id, limit=None)
    return Quota(project_id=project_id, limit=limit, used=used(connection, project_id, now_at))


def used(connection: sa.Connection, project_id: str, now_at: int) -> int:
    """Return the bytes of a project's files and of its pending uploads' parts."""
    held = sa.select(sa.func.coalesce(sa.func.sum(files.c.bytes), 0)).where(
        sa.text(HELD_WHERE),
        files.c.project_id == project_id,
        sa.or_(files.c.expires_at.is_(None), files.c.expires_at > now_at),
    )
    coming = sa.select(sa.func.coalesce(sa.func.sum(uploads.c.stored_bytes), 0)).where(
        sa.text(PENDING_WHERE), uploads.c.project_id == project_id, uploads.c.expires_at > now_at
    )
    return int(connection.scalar(held) or 0) + int(connection.scalar(coming) or 0)


def set_quota(connection: sa.Connection, project_id: str, quota_bytes: int | None) -> None:
    """Give a project a quota of its own, 0 for no limit; None means the setting's again.

    Raises:
        InvalidRequestError: it is negative.
        NotFoundError: no such project.
    """
    if quota_bytes is not None and not 0 <= quota_bytes < 1 << 63:
        raise InvalidRequestError("A quota is 0 bytes, for no limit, or more.", param="quota_bytes")
    changed = connection.execute(
        projects.update().where(projects.c.id == project_id).values(quota_bytes=quota_bytes)
    )
    if changed.rowcount != 1:
        raise NotFoundError(
            f"No project '{project_id[:100]}'; making a key for it makes it.", param="project_id"
        )


def list_page(connection: sa.Connection, after: str, project_id: str) -> list[Row]:
    """Return projects by name, one more than `MOST_PROJECTS` at most; one where it is named."""
    query = sa.select(projects).where(projects.c.id > after).order_by(projects.c.id)
    if project_id:
        query = query.where(projects.c.id == project_id)
    return list(connection.execute(query.limit(MOST_PROJECTS + 1)))
