"""Statements on deliveries: what is to be told of a batch's end, to whom, and what came of it."""

from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa

from services.kit.wire.errors import ConflictError, NotFoundError
from services.kit.wire.ids import ProjectId
from services.store.context import next_seq
from services.store.db.dialect import OthersDead
from services.store.domain import webhooks
from services.store.domain.state import BatchStatus
from services.store.tables.webhooks import (
    DELIVERED,
    ENDED_WHERE,
    GIVEN_UP,
    LIVE_WHERE,
    PENDING,
    PENDING_WHERE,
    deliveries,
    webhook_endpoints,
)

Row = sa.Row[Any]

KEPT_MS: Final = 30 * 86_400_000
"""How long an ended delivery can be looked at and sent again."""
_LATE_AT_ONCE: Final = 1_000


# Made once: each batch's end asks for it.
_ENDPOINTS: Final = (
    sa.select(webhook_endpoints.c.id, webhook_endpoints.c.event_types)
    .where(
        webhook_endpoints.c.project_id == sa.bindparam("of_project"),
        webhook_endpoints.c.deleted_at.is_(None),
    )
    .order_by(webhook_endpoints.c.seq)
)


def add(
    connection: sa.Connection,
    *,
    batch_id: str,
    project_id: ProjectId,
    end: BatchStatus,
    now_ms: int,
) -> int:
    """Note that the project's endpoints are to be told of a batch's end; return how many are.

    To be called in the transaction that ends the batch, at `now_ms`.
    """
    event_type = webhooks.EVENT_TYPES[end]
    endpoints = connection.execute(_ENDPOINTS, {"of_project": project_id}).all()
    told = [row.id for row in endpoints if event_type in row.event_types]
    event = webhooks.event_id(batch_id)
    now_at = now_ms // 1000
    for endpoint_id in told:
        connection.execute(
            deliveries.insert().values(
                id=webhooks.delivery_id(endpoint_id, event),
                seq=next_seq(connection),
                project_id=project_id,
                endpoint_id=endpoint_id,
                event_id=event,
                event_type=event_type,
                batch_id=batch_id,
                payload=webhooks.payload(event, event_type, batch_id, now_at),
                created_at=now_at,
                state=PENDING,
                since_ms=now_ms,
                next_ms=now_ms,
            )
        )
    return len(told)


def _due(connection: sa.Connection, now_ms: int, others_dead: OthersDead) -> sa.ColumnElement[bool]:
    """Pending, its time come, and nobody at it."""
    free = sa.or_(
        deliveries.c.lease_holder.is_(None),
        deliveries.c.lease_until_ms <= now_ms,
        others_dead(connection, deliveries.c.lease_holder),
    )
    return sa.and_(sa.text(PENDING_WHERE), deliveries.c.next_ms <= now_ms, free)


# Asked at the end of each batch, and most systems have no webhooks.
_ANY_DUE: Final = (
    sa.select(deliveries.c.id)
    .where(sa.text(PENDING_WHERE), deliveries.c.next_ms <= sa.bindparam("now_ms"))
    .limit(1)
)


def due(connection: sa.Connection, *, now_ms: int, others_dead: OthersDead) -> list[Row]:
    """Return each endpoint to which something could be sent now, with what is longest due.

    The rows have `endpoint_id`, `project_id` and the delivery's `id`. The cost grows with the
    number of endpoints, not with what waits.

    Args:
        connection: of a reader or the writer.
        now_ms: the store's time.
        others_dead: returns the condition that a holder is a store that is dead for certain.
    """
    if connection.scalar(_ANY_DUE, {"now_ms": now_ms}) is None:
        return []
    first = (
        sa.select(deliveries.c.id)
        .where(
            deliveries.c.endpoint_id == webhook_endpoints.c.id,
            _due(connection, now_ms, others_dead),
        )
        .order_by(deliveries.c.next_ms)
        .limit(1)
        .correlate(webhook_endpoints)
        .scalar_subquery()
    )
    found = (
        sa.select(
            webhook_endpoints.c.id.label("endpoint_id"),
            webhook_endpoints.c.project_id,
            first.label("id"),
        )
        .where(sa.text(LIVE_WHERE))
        .subquery()
    )
    return list(connection.execute(sa.select(found).where(found.c.id.is_not(None))))


def claim(
    connection: sa.Connection,
    ids: Sequence[str],
    *,
    holder: str,
    now_ms: int,
    lease_ms: int,
    others_dead: OthersDead,
) -> list[Row]:
    """Begin an attempt of each that still is due; return their rows with `url` and `secrets`."""
    claimed = connection.scalars(
        deliveries.update()
        .where(deliveries.c.id.in_(ids), _due(connection, now_ms, others_dead))
        .values(
            attempts=deliveries.c.attempts + 1,
            lease_holder=holder,
            lease_until_ms=now_ms + lease_ms,
        )
        .returning(deliveries.c.id)
    ).all()
    return list(
        connection.execute(
            sa.select(deliveries, webhook_endpoints.c.url, webhook_endpoints.c.secrets)
            .join(webhook_endpoints, webhook_endpoints.c.id == deliveries.c.endpoint_id)
            .where(deliveries.c.id.in_(claimed))
        )
    )


def record(
    connection: sa.Connection,
    attempt: Row,
    *,
    holder: str,
    status: int | None,
    error: str | None,
    next_ms: int | None,
    now_ms: int,
) -> bool:
    """Note what came of an attempt; tell whether it still was the delivery's own.

    Args:
        connection: in a transaction.
        attempt: the row that `claim` returned.
        holder: who claimed it.
        status: of the HTTP answer, if one came.
        error: why it failed; None means delivered.
        next_ms: when to try again; None with an error means given up.
        now_ms: the store's time.
    """
    values: dict[str, object] = {
        "lease_holder": None,
        "lease_until_ms": None,
        "last_status": status,
        "last_error": error,
    }
    since_ms = connection.scalar(
        sa.select(deliveries.c.since_ms).where(deliveries.c.id == attempt.id).with_for_update()
    )
    if error is None:
        values |= {"state": DELIVERED, "next_ms": None, "ended_ms": now_ms}
    elif since_ms != attempt.since_ms:
        # It was asked to be sent again meanwhile: at once, then, and no reason to give up.
        pass
    elif next_ms is None:
        values |= {"state": GIVEN_UP, "next_ms": None, "ended_ms": now_ms}
    else:
        values["next_ms"] = next_ms
    recorded = connection.execute(
        deliveries.update()
        .where(
            deliveries.c.id == attempt.id,
            sa.text(PENDING_WHERE),
            deliveries.c.lease_holder == holder,
        )
        .values(**values)
    )
    return recorded.rowcount == 1


def give_up_all(connection: sa.Connection, endpoint_id: str, now_ms: int) -> None:
    """Give up what waits to be sent to an endpoint that is deleted."""
    connection.execute(
        deliveries.update()
        .where(deliveries.c.endpoint_id == endpoint_id, sa.text(PENDING_WHERE))
        .values(**_given_up("the endpoint was deleted", now_ms))
    )


def give_up_late(connection: sa.Connection, endpoint_id: str, now_ms: int) -> None:
    """Give up what has waited for 72 hours for an endpoint that is paused because it hangs."""
    late = (
        sa.select(deliveries.c.id)
        .where(
            deliveries.c.endpoint_id == endpoint_id,
            sa.text(PENDING_WHERE),
            deliveries.c.lease_holder.is_(None),
            deliveries.c.since_ms <= now_ms - webhooks.GIVE_UP_MS,
        )
        .limit(_LATE_AT_ONCE)
    )
    connection.execute(
        deliveries.update()
        .where(deliveries.c.id.in_(connection.scalars(late).all()))
        .values(**_given_up("the endpoint does not answer", now_ms))
    )


def _given_up(error: str, now_ms: int) -> dict[str, object]:
    return {
        "state": GIVEN_UP,
        "next_ms": None,
        "lease_holder": None,
        "lease_until_ms": None,
        "last_error": error,
        "ended_ms": now_ms,
    }


def list_page(
    connection: sa.Connection,
    *,
    project_id: ProjectId,
    endpoint_id: str,
    state: str,
    after: str,
    limit: int,
) -> tuple[list[Row], bool]:
    """Return up to `limit` deliveries, newest first, and whether there are more.

    Raises:
        NotFoundError: `after` is no delivery of this project.
    """
    query = sa.select(deliveries).where(deliveries.c.project_id == project_id)
    if endpoint_id:
        query = query.where(deliveries.c.endpoint_id == endpoint_id)
    if state:
        query = query.where(deliveries.c.state == state)
    if after:
        seq = connection.scalar(
            sa.select(deliveries.c.seq).where(
                deliveries.c.id == after, deliveries.c.project_id == project_id
            )
        )
        if seq is None:
            raise NotFoundError(f"No webhook delivery found with id '{after}'.", param="after")
        query = query.where(deliveries.c.seq < seq)
    rows = list(connection.execute(query.order_by(deliveries.c.seq.desc()).limit(limit + 1)))
    return rows[:limit], len(rows) > limit


def send_again(
    connection: sa.Connection, wanted: str, project_id: ProjectId, now_ms: int
) -> list[Row]:
    """Have a delivery, or all of an event, sent at once and for 72 hours more; return the rows.

    Raises:
        NotFoundError: no such delivery or event in this project.
        ConflictError: none of their endpoints is left.
    """
    chosen = sa.and_(
        deliveries.c.project_id == project_id,
        deliveries.c.event_id == wanted if wanted.startswith("evt_") else deliveries.c.id == wanted,
    )
    found = connection.execute(
        sa.select(deliveries.c.id, webhook_endpoints.c.deleted_at)
        .join(webhook_endpoints, webhook_endpoints.c.id == deliveries.c.endpoint_id)
        .where(chosen)
    ).all()
    if not found:
        raise NotFoundError(f"No webhook delivery or event found with id '{wanted}'.")
    ids = [row.id for row in found if row.deleted_at is None]
    if not ids:
        raise ConflictError(f"The endpoint that '{wanted}' went to was deleted.")
    connection.execute(
        deliveries.update()
        .where(deliveries.c.id.in_(ids))
        .values(state=PENDING, since_ms=now_ms, attempts=0, next_ms=now_ms, ended_ms=None)
    )
    return list(
        connection.execute(
            sa.select(deliveries).where(deliveries.c.id.in_(ids)).order_by(deliveries.c.seq)
        )
    )


def purge(connection: sa.Connection, now_ms: int, limit: int) -> int:
    """Forget up to `limit` deliveries that ended long ago; return how many."""
    old = connection.scalars(
        sa.select(deliveries.c.id)
        .where(sa.text(ENDED_WHERE), deliveries.c.ended_ms <= now_ms - KEPT_MS)
        .limit(limit)
    ).all()
    if old:
        connection.execute(deliveries.delete().where(deliveries.c.id.in_(old)))
    return len(old)
