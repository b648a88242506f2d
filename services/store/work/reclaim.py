"""Reconciling: which chunks are to be handed out again (design, rule 1)."""

from collections.abc import Collection, Sequence
from typing import Any, Final

import sqlalchemy as sa

from protos.nightshift.v1 import dispatch_pb2
from services.kit.wire.ids import IdGenerator
from services.store.db.leases import Leases
from services.store.domain.state import BatchStatus
from services.store.tables.core import batches, chunks
from services.store.work import attempts_repo, chunks_repo, deaths_repo, quarantine

Row = sa.Row[*tuple[Any, ...]]

UNOPENED_MS: Final = 2_000
"""A chunk that nobody opened for so long, with nothing waiting on the bus, was lost on the way."""
LIMIT: Final = 256

_RUNS: Final = sa.and_(
    batches.c.status == BatchStatus.IN_PROGRESS.value,
    batches.c.sealed_ms.is_(None),
    batches.c.stopping_ms.is_(None),
    batches.c.expires_ms > sa.bindparam("now_ms"),
    batches.c.retry_ms <= sa.bindparam("now_ms"),
    ~deaths_repo.HELD,
)
_OPEN: Final = (
    sa.select(chunks.c.id, chunks.c.pool_id, chunks.c.project_id)
    .join(batches, batches.c.id == chunks.c.batch_id)
    # Word for word the condition of the index of open chunks.
    .where(sa.text("state <> 'done'"), _RUNS)
    .order_by(chunks.c.batch_seq, chunks.c.first_line)
)


def reclaim(
    connection: sa.Connection,
    *,
    idle_pools: Collection[str],
    limit: int,
    max_attempts: int,
    new_id: IdGenerator,
    now_ms: int,
    leases: Leases,
) -> list[dispatch_pb2.Dispatch]:
    """Raise the dispatch of chunks that have no live lease and return their messages.

    Args:
        connection: in a transaction; wake `outbox` and `ender` once it is committed.
        idle_pools: pools on whose queues nothing waits.
        limit: most chunks to raise, those that run alone not counted.
        max_attempts: deaths after which a single line is not tried again.
        new_id: names new chunks.
        now_ms: the store's time.
        leases: which of them count as lapsed.

    Returns:
        Chunks that run alone first, at most one a pool; the others by (`seq`, line).
    """
    lapsed = _lapsed(connection, limit, now_ms, leases)
    lost = attempts_repo.open_of_chunks(connection, lapsed)
    quarantine.take_apart(
        connection,
        [quarantine.loss_of(attempt) for attempt in lost],
        attempts_repo.Outcome.LOST,
        new_id=new_id,
        now_ms=now_ms,
    )
    raised = [*_still_out(connection, lapsed), *_unopened(connection, idle_pools, limit, now_ms)]
    raised = [*_next_alone(connection, max_attempts, now_ms), *raised[:limit]]
    if raised:
        chunks_repo.raise_dispatch(connection, raised, now_ms)
    return chunks_repo.dispatches(connection, raised)


def _lapsed(connection: sa.Connection, limit: int, now_ms: int, leases: Leases) -> list[str]:
    query = _OPEN.where(
        chunks.c.state == chunks_repo.OUT, leases.lapsed(chunks.c.lease_until_ms, now_ms)
    )
    return [row.id for row in connection.execute(query.limit(limit), {"now_ms": now_ms})]


def _still_out(connection: sa.Connection, chunk_ids: Sequence[str]) -> list[str]:
    """Those of these chunks that quarantine left something of."""
    if not chunk_ids:
        return []
    query = (
        sa.select(chunks.c.id)
        .where(chunks.c.id.in_(chunk_ids), chunks.c.state == chunks_repo.OUT)
        .order_by(chunks.c.batch_seq, chunks.c.first_line)
    )
    return list(connection.scalars(query))


def _unopened(
    connection: sa.Connection, idle_pools: Collection[str], limit: int, now_ms: int
) -> list[str]:
    if not idle_pools:
        return []
    query = _OPEN.where(
        chunks.c.state == chunks_repo.OUT,
        chunks.c.lease_until_ms.is_(None),
        # Later than now where the clock was set back.
        sa.or_(
            chunks.c.dispatched_ms <= now_ms - UNOPENED_MS,
            chunks.c.dispatched_ms > now_ms + UNOPENED_MS,
        ),
        chunks.c.pool_id.in_(list(idle_pools)),
    )
    return [row.id for row in connection.execute(query.limit(limit), {"now_ms": now_ms})]


def _next_alone(connection: sa.Connection, max_attempts: int, now_ms: int) -> list[str]:
    """The first waiting chunk of each pool in which none runs alone now.

    Those of projects whose lines have ended fewer engines lately come first.
    """
    busy = set(
        connection.scalars(
            sa.select(chunks.c.pool_id)
            .join(batches, batches.c.id == chunks.c.batch_id)
            .where(
                sa.text("state <> 'done'"),
                chunks.c.state == chunks_repo.OUT,
                chunks.c.alone,
                # One of a batch that waits is given back unopened, and holds up no other.
                sa.or_(
                    sa.and_(batches.c.retry_ms <= now_ms, ~deaths_repo.HELD),
                    chunks.c.lease_until_ms > now_ms,
                ),
            ),
            {"now_ms": now_ms},
        )
    )
    waiting = connection.execute(
        _OPEN.where(
            chunks.c.state == chunks_repo.QUEUED,
            chunks.c.alone,
            chunks.c.deaths_alone < max_attempts,
        ),
        {"now_ms": now_ms},
    )
    deaths = deaths_repo.recent(connection, now_ms)
    first: dict[str, tuple[float, str]] = {}
    for row in waiting:
        if row.pool_id not in busy:
            mine = (deaths.get((row.project_id, row.pool_id), 0.0), row.id)
            # Of equals the earlier one stays.
            if row.pool_id not in first or mine[0] < first[row.pool_id][0]:
                first[row.pool_id] = mine
    return [chunk_id for _, chunk_id in first.values()]
