"""Engine deaths that lines are to blame for, by project and pool (domain/death_budget.py)."""

from typing import Any, Final

import sqlalchemy as sa

from services.kit.process.log import get_logger
from services.store.domain.death_budget import Cost, charged, hold_ms, is_spent
from services.store.domain.state import BatchStatus
from services.store.tables.core import batch_models, batches, chunks, pools
from services.store.tables.ledgers import pool_deaths
from services.store.work import chunks_repo

_log = get_logger(__name__)

Row = sa.Row[*tuple[Any, ...]]

RECENT_MS: Final = 3_600_000
"""Projects without a death for so long come as early as any."""


def charge(
    connection: sa.Connection, batch: Row, pool_id: str, *, taken_ms: int, now_ms: int
) -> bool:
    """Charge a death to a batch whose lines were alone in the engine; hold the batch if need be.

    Args:
        connection: in a transaction.
        batch: its row.
        pool_id: whose executor lost its engine.
        taken_ms: what the death takes of that executor's time.
        now_ms: the store's time.

    Returns:
        Whether the batch's suspects are to be searched no more.
    """
    executors = connection.scalar(sa.select(pools.c.executors_ready).where(pools.c.id == pool_id))
    cost = Cost(taken_ms=taken_ms, executors=max(executors or 0, 1))
    of_project = sa.and_(
        pool_deaths.c.project_id == batch.project_id, pool_deaths.c.pool_id == pool_id
    )
    row = connection.execute(sa.select(pool_deaths).where(of_project)).first()
    deaths = charged(row.deaths, now_ms - row.at_ms, cost) if row else 1.0
    left_ms = batch.expires_ms - now_ms
    # A pool that works for nobody else has nothing to spare its time for.
    over = deaths if _has_others(connection, batch, pool_id) else 0.0
    waits_ms = hold_ms(over, cost, left_ms)
    # A batch with little time left waits less, but does not let the others of its project go on.
    until_ms = max(now_ms + waits_ms, row.held_until_ms if row else 0)
    values = {"deaths": deaths, "at_ms": now_ms, "held_until_ms": until_ms}
    if row:
        connection.execute(pool_deaths.update().where(of_project).values(**values))
    else:
        keys = {"project_id": batch.project_id, "pool_id": pool_id}
        connection.execute(pool_deaths.insert().values(**keys, **values))
    of_batch = batch.engine_deaths + 1
    fields: dict[str, Any] = {}
    if waits_ms:
        _log.warning("batch_held", batch=batch.id, deaths=of_batch, seconds=waits_ms // 1000)
        fields = {"retry_ms": now_ms + waits_ms, "tries": 0, "fault": _words(of_batch)}
    connection.execute(
        batches.update().where(batches.c.id == batch.id).values(engine_deaths=of_batch, **fields)
    )
    return is_spent(of_batch, over, cost, left_ms)


def _has_others(connection: sa.Connection, batch: Row, pool_id: str) -> bool:
    """Tell whether batches of other projects run in a pool."""
    runs = sa.and_(batches.c.status == BatchStatus.IN_PROGRESS.value, batches.c.sealed_ms.is_(None))
    query = (
        sa.select(batches.c.id)
        .outerjoin(batch_models, batch_models.c.batch_id == batches.c.id)
        .where(
            runs,
            batches.c.project_id != batch.project_id,
            sa.or_(batches.c.pool_id == pool_id, batch_models.c.pool_id == pool_id),
        )
        .limit(1)
    )
    return connection.execute(query).first() is not None


def _words(deaths: int) -> str:
    return (
        f"its lines ended the engine {deaths} times, so it gets a share of the pool's time and "
        "goes on by itself after a pause. The lines to blame are found one by one; after too many "
        "deaths those that were in the engine are given up together"
    )


def _holds(now_ms: int | sa.BindParameter[int]) -> sa.ColumnElement[bool]:
    # Charged later than now where the clock was set back.
    return sa.and_(pool_deaths.c.held_until_ms > now_ms, pool_deaths.c.at_ms <= now_ms)


HELD: Final = (
    sa.exists()
    .where(
        pool_deaths.c.project_id == chunks.c.project_id,
        pool_deaths.c.pool_id == chunks.c.pool_id,
        _holds(sa.bindparam("now_ms")),
    )
    .correlate(chunks)
)
"""Chunks of projects of which nothing is handed out in that pool now.

The batch whose line died says why it waits; but another one of its project, such as the next of
many with one line each, may not go on in its place.
"""


def held(connection: sa.Connection, now_ms: int) -> dict[str, list[str]]:
    """Return by pool the projects of which nothing is handed out there now."""
    found: dict[str, list[str]] = {}
    for row in connection.execute(sa.select(pool_deaths).where(_holds(now_ms))):
        found.setdefault(row.pool_id, []).append(row.project_id)
    return found


def held_ms(connection: sa.Connection, chunk: Row, now_ms: int) -> int:
    """Return for how long nothing of a chunk's project is handed out in its pool; 0 for not."""
    until_ms = connection.scalar(
        sa.select(pool_deaths.c.held_until_ms).where(
            pool_deaths.c.project_id == chunk.project_id,
            pool_deaths.c.pool_id == chunk.pool_id,
            _holds(now_ms),
        )
    )
    return (until_ms or now_ms) - now_ms


def is_held(row: Row) -> bool:
    """Tell whether it is deaths that a batch with `retry_ms` in the future waits for."""
    return bool(row.tries == 0 and row.engine_deaths)


def recent(connection: sa.Connection, now_ms: int) -> dict[tuple[str, str], float]:
    """Return the deaths of projects and pools that had some lately."""
    query = sa.select(pool_deaths).where(pool_deaths.c.at_ms > now_ms - RECENT_MS)
    return {(row.project_id, row.pool_id): row.deaths for row in connection.execute(query)}


POISON: Final = sa.and_(
    sa.text("state <> 'done'"),
    chunks.c.state == chunks_repo.QUEUED,
    chunks.c.deaths_alone >= sa.bindparam("max_attempts"),
)
"""Chunks of one line that is not tried again."""


def poison(connection: sa.Connection, max_attempts: int, now_ms: int) -> list[Row]:
    """Return the chunks whose single line is to be given up, of batches that run."""
    query = (
        sa.select(
            chunks.c.id,
            chunks.c.batch_id,
            chunks.c.project_id,
            chunks.c.dispatch,
            chunks.c.first_line,
            chunks.c.deaths_alone,
            batches.c.input_parts,
            batches.c.index_blob,
        )
        .join(batches, batches.c.id == chunks.c.batch_id)
        .where(
            POISON,
            batches.c.sealed_ms.is_(None),
            # Not of one whose input cannot be read; one that is held for its deaths does no harm.
            sa.or_(batches.c.retry_ms <= now_ms, batches.c.tries == 0),
        )
        .limit(64)
    )
    return list(connection.execute(query, {"max_attempts": max_attempts}))
