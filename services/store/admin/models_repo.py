"""Models and pools as rows: a known model without a live executor is known all the same."""

import re
from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa

from protos.nightshift.v1 import models_pb2
from services.kit.wire.endpoints import ENDPOINTS
from services.kit.wire.errors import ConflictError, InvalidRequestError, NotFoundError
from services.store.tables.core import models, pools

Row = sa.Row[Any]

# Part of subjects on the bus: one that could not be published to would hold up every other event.
_POOL_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def put_pool(
    connection: sa.Connection, pool_id: str, now_at: int, engine_revision: str | None = None
) -> None:
    """Make a pool where it is missing; note the revision of its engines where it is known.

    Raises:
        InvalidRequestError: no pool can have this id.
    """
    if _POOL_ID.fullmatch(pool_id) is None:
        raise InvalidRequestError(
            f"A pool's id is 1 to 64 of A-Z, a-z, 0-9, '_' and '-', not {pool_id[:100]!r}.",
            param="pool_id",
        )
    found = connection.scalar(sa.select(pools.c.id).where(pools.c.id == pool_id))
    if found is None:
        connection.execute(
            pools.insert().values(
                id=pool_id, name=pool_id, engine_revision=engine_revision, created_at=now_at
            )
        )
    elif engine_revision is not None:
        connection.execute(
            pools.update().where(pools.c.id == pool_id).values(engine_revision=engine_revision)
        )


def put_model(
    connection: sa.Connection,
    *,
    name: str,
    pool_id: str,
    endpoints: Sequence[str],
    context_length: int | None,
    now_at: int,
) -> None:
    """Make a model, or note what is new about it; its pool must exist.

    Raises:
        ConflictError: the name belongs to another pool.
    """
    row = connection.execute(sa.select(models).where(models.c.name == name)).first()
    if row is None:
        connection.execute(
            models.insert().values(
                name=name,
                pool_id=pool_id,
                endpoints=sorted(endpoints),
                context_length=context_length,
                created_at=now_at,
            )
        )
        return
    if row.pool_id != pool_id:
        raise ConflictError(
            f"The model '{name}' is served by pool '{row.pool_id}'. Remove it first with "
            f"`nightshift models remove {name}`, or serve this one under another name."
        )
    values: dict[str, object] = {}
    if endpoints:
        values["endpoints"] = sorted(endpoints)
    if context_length is not None:
        values["context_length"] = context_length
    if values:
        connection.execute(models.update().where(models.c.name == name).values(**values))


_ALL: Final = sa.select(models)


def list_all(connection: sa.Connection) -> list[Row]:
    """Return all models by name."""
    # Databases have collations of their own.
    return sorted(connection.execute(_ALL), key=lambda row: str(row.name))


def get(connection: sa.Connection, name: str) -> Row:
    """Return a model's row.

    Raises:
        NotFoundError: unknown.
    """
    row = connection.execute(sa.select(models).where(models.c.name == name)).first()
    if row is None:
        raise NotFoundError(
            f"The model '{name}' does not exist.", code="model_not_found", param="model"
        )
    return row


def delete(connection: sa.Connection, name: str) -> None:
    """Remove a model's name.

    Raises:
        NotFoundError: unknown.
    """
    get(connection, name)
    connection.execute(models.delete().where(models.c.name == name))


def served(rows: Sequence[Row]) -> dict[str, frozenset[str]]:
    """Return the endpoints of each model; a pool that has not said yet may serve any."""
    return {row.name: frozenset(row.endpoints or ENDPOINTS) for row in rows}


def to_proto(row: Row) -> models_pb2.Model:
    """Return a model's row as its message."""
    return models_pb2.Model(
        id=row.name,
        created_at=row.created_at,
        pool_id=row.pool_id,
        endpoints=row.endpoints,
        context_length=row.context_length,
    )
