"""Statements on the engine configurations that ran lines of a batch."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa

from services.store.domain.explanation import Engines
from services.store.tables.core import batch_engines, executors

Row = sa.Row[Any]
Key = tuple[str, str, str]
"""Batch, pool, revision."""

_REMEMBERED: Final = 8_192
"""Keys and executors kept in mind; what falls out costs a look into the database."""

_REVISION: Final = sa.select(executors.c.engine_revision).where(
    executors.c.id == sa.bindparam("executor_id"),
    executors.c.incarnation == sa.bindparam("incarnation"),
)
_KNOWN: Final = sa.select(batch_engines.c.first_ms).where(
    batch_engines.c.batch_id == sa.bindparam("batch_id"),
    batch_engines.c.pool_id == sa.bindparam("pool_id"),
    batch_engines.c.engine_revision == sa.bindparam("engine_revision"),
)
_OF_BATCHES: Final = (
    sa.select(batch_engines.c.batch_id, batch_engines.c.pool_id, batch_engines.c.engine_revision)
    .where(batch_engines.c.batch_id.in_(sa.bindparam("batch_ids", expanding=True)))
    .order_by(
        batch_engines.c.batch_id,
        batch_engines.c.pool_id,
        batch_engines.c.first_ms,
        batch_engines.c.engine_revision,
    )
)


class EngineNotes:
    """Notes which engine configurations run a batch; what is noted costs nothing the next time.

    Used by statements in the writer's thread; `keep` is called once they are committed.
    """

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._noted: OrderedDict[Key, None] = OrderedDict()
        self._revisions: OrderedDict[tuple[str, str], str] = OrderedDict()

    def note(
        self,
        connection: sa.Connection,
        chunk: Row,
        *,
        executor_id: str,
        incarnation: str,
        now_ms: int,
    ) -> Key | None:
        """Note that an executor runs lines of a chunk's batch; None where its engine is unknown."""
        revision = self._revision(connection, executor_id, incarnation)
        if not revision:
            return None
        key = (chunk.batch_id, chunk.pool_id, revision)
        if key not in self._noted:
            values = {"batch_id": key[0], "pool_id": key[1], "engine_revision": revision}
            if connection.scalar(_KNOWN, values) is None:
                more = {"project_id": chunk.project_id, "first_ms": now_ms}
                connection.execute(batch_engines.insert(), {**values, **more})
        return key

    def keep(self, key: Key | None) -> None:
        """Remember a key whose row is committed."""
        if key is not None:
            self._noted[key] = None
            if len(self._noted) > _REMEMBERED:
                self._noted.popitem(last=False)

    def _revision(self, connection: sa.Connection, executor_id: str, incarnation: str) -> str:
        """An executor's engine; it registers at each start, and its life has one configuration."""
        life = (executor_id, incarnation)
        revision = self._revisions.get(life, "")
        if not revision:
            found = connection.scalar(
                _REVISION, {"executor_id": executor_id, "incarnation": incarnation}
            )
            revision = found or ""
            if revision:
                self._revisions[life] = revision
                if len(self._revisions) > _REMEMBERED:
                    self._revisions.popitem(last=False)
        return revision


def of_batches(connection: sa.Connection, rows: Sequence[Row]) -> dict[str, tuple[Engines, ...]]:
    """Return what ran lines of these batches so far, by batch; those without are left out."""
    ids = [row.id for row in rows if row.pool_id is not None]
    if not ids:
        return {}
    pools: dict[str, dict[str, list[str]]] = {}
    for batch_id, pool_id, revision in connection.execute(_OF_BATCHES, {"batch_ids": ids}):
        pools.setdefault(batch_id, {}).setdefault(pool_id, []).append(revision)
    return {
        batch_id: tuple(Engines(pool=pool, revisions=tuple(seen)) for pool, seen in found.items())
        for batch_id, found in pools.items()
    }
