"""Statements on webhook endpoints: who is told of a batch's end."""

from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa

from services.kit.wire.errors import ConflictError, InvalidRequestError, NotFoundError
from services.kit.wire.ids import ProjectId
from services.store.context import next_seq
from services.store.tables.webhooks import webhook_endpoints
from services.store.webhooks import deliveries_repo

Row = sa.Row[Any]

MAX_ENDPOINTS: Final = 20
"""Endpoints of a project: each is a row more in the transaction that ends a batch."""
MAX_SECRETS: Final = 10
"""Secrets of an endpoint that sign at once: each is a signature more in a header."""
ROTATION_MS: Final = 24 * 3_600_000


def _live(endpoint_id: str, project_id: ProjectId) -> sa.ColumnElement[bool]:
    return sa.and_(
        webhook_endpoints.c.id == endpoint_id,
        webhook_endpoints.c.project_id == project_id,
        webhook_endpoints.c.deleted_at.is_(None),
    )


def insert(
    connection: sa.Connection,
    *,
    endpoint_id: str,
    project_id: ProjectId,
    name: str,
    url: str,
    event_types: Sequence[str],
    secret: str,
    now_at: int,
) -> Row:
    """Insert an endpoint; its values were checked.

    Raises:
        InvalidRequestError: the project has as many as it may.
    """
    live = connection.scalar(
        sa.select(sa.func.count())
        .select_from(webhook_endpoints)
        .where(
            webhook_endpoints.c.project_id == project_id,
            webhook_endpoints.c.deleted_at.is_(None),
        )
    )
    if live is not None and live >= MAX_ENDPOINTS:
        raise InvalidRequestError(
            f"A project may have at most {MAX_ENDPOINTS} webhook endpoints; delete one first.",
            code="too_many_webhook_endpoints",
        )
    connection.execute(
        webhook_endpoints.insert().values(
            id=endpoint_id,
            seq=next_seq(connection),
            project_id=project_id,
            name=name,
            url=url,
            event_types=list(event_types),
            secrets=[[secret, None]],
            created_at=now_at,
            updated_at=now_at,
        )
    )
    return get(connection, endpoint_id, project_id)


def get(connection: sa.Connection, endpoint_id: str, project_id: ProjectId) -> Row:
    """Return an endpoint's row.

    Raises:
        NotFoundError: unknown, deleted or another project's.
    """
    row = connection.execute(
        sa.select(webhook_endpoints).where(_live(endpoint_id, project_id))
    ).first()
    if row is None:
        raise NotFoundError(f"No webhook endpoint found with id '{endpoint_id}'.")
    return row


def list_page(
    connection: sa.Connection, *, project_id: ProjectId, after: str, limit: int
) -> tuple[list[Row], bool]:
    """Return up to `limit` endpoints, newest first, and whether there are more.

    Raises:
        NotFoundError: `after` never was an endpoint of this project; a deleted one still pages.
    """
    query = sa.select(webhook_endpoints).where(
        webhook_endpoints.c.project_id == project_id, webhook_endpoints.c.deleted_at.is_(None)
    )
    if after:
        seq = connection.scalar(
            sa.select(webhook_endpoints.c.seq).where(
                webhook_endpoints.c.id == after, webhook_endpoints.c.project_id == project_id
            )
        )
        if seq is None:
            raise NotFoundError(f"No webhook endpoint found with id '{after}'.", param="after")
        query = query.where(webhook_endpoints.c.seq < seq)
    rows = list(connection.execute(query.order_by(webhook_endpoints.c.seq.desc()).limit(limit + 1)))
    return rows[:limit], len(rows) > limit


def update(
    connection: sa.Connection,
    endpoint_id: str,
    project_id: ProjectId,
    now_at: int,
    **wanted: object,
) -> Row:
    """Change the columns given; what is so already changes nothing, `updated_at` neither.

    Raises:
        NotFoundError: unknown, deleted or another project's.
    """
    row = get(connection, endpoint_id, project_id)
    changed = {name: value for name, value in wanted.items() if getattr(row, name) != value}
    if not changed:
        return row
    connection.execute(
        webhook_endpoints.update()
        .where(_live(endpoint_id, project_id))
        .values(**changed, updated_at=now_at)
    )
    return get(connection, endpoint_id, project_id)


def rotate(
    connection: sa.Connection,
    endpoint_id: str,
    project_id: ProjectId,
    *,
    secret: str,
    keep_old: bool,
    now_ms: int,
) -> Row:
    """Sign with `secret` from now on; with `keep_old` those that are live go on for 24 hours.

    Raises:
        NotFoundError: unknown, deleted or another project's.
        ConflictError: so many are live that there is no room for one more.
    """
    row = get(connection, endpoint_id, project_id)
    kept: list[tuple[str, int]] = []
    if keep_old:
        kept = [
            # A secret that was to end earlier still does.
            (old, now_ms + ROTATION_MS if until_ms is None else until_ms)
            for old, until_ms in row.secrets
            if until_ms is None or until_ms > now_ms
        ]
    if len(kept) >= MAX_SECRETS:
        raise ConflictError(
            f"{len(kept)} secrets of this endpoint are active. Wait until one has ended, or rotate "
            "without keeping the old ones."
        )
    return update(
        connection,
        endpoint_id,
        project_id,
        now_ms // 1000,
        secrets=[[secret, None], *([old, until_ms] for old, until_ms in kept)],
    )


def live_secrets(secrets: Sequence[tuple[str, int | None]], now_ms: int) -> list[str]:
    """Return the secrets that sign now, newest first, of an endpoint's column."""
    return [secret for secret, until_ms in secrets if until_ms is None or until_ms > now_ms]


def delete(connection: sa.Connection, endpoint_id: str, project_id: ProjectId, now_ms: int) -> None:
    """Delete an endpoint, forget its secrets, and give up what waits to be sent to it.

    Raises:
        NotFoundError: unknown, deleted or another project's.
    """
    deleted = connection.execute(
        webhook_endpoints.update()
        .where(_live(endpoint_id, project_id))
        .values(deleted_at=now_ms // 1000, secrets=[])
    )
    if deleted.rowcount != 1:
        raise NotFoundError(f"No webhook endpoint found with id '{endpoint_id}'.")
    deliveries_repo.give_up_all(connection, endpoint_id, now_ms)
