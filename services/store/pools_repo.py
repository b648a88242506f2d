"""Statements on pools: what the scheduler says of them, and what that means for a batch."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import sqlalchemy as sa

from services.store.domain.state import BatchStatus
from services.store.domain.waiting import MOST_AHEAD, Explanation, Pool, explain
from services.store.models import WINDOW_WHERE, batches, pools

Row = sa.Row[Any]

STALE_MS: Final = 30_000
"""What was said longer ago than this is known no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """See `PoolReport`."""

    pool_id: str
    executors_alive: int
    executors_ready: int
    seats: int
    lines_per_second: float


def note(connection: sa.Connection, reports: Iterable[Report], now_ms: int) -> None:
    """Note what is said of pools; unknown ones are left out."""
    for report in reports:
        values = asdict(report)
        pool_id = values.pop("pool_id")
        connection.execute(
            pools.update().where(pools.c.id == pool_id).values(**values, reported_ms=now_ms)
        )


def explanations(connection: sa.Connection, rows: Sequence[Row], now_ms: int) -> list[Explanation]:
    """Say what each of these batches (rows of one page) waits for, in their order.

    The cost is bounded: a row a pool, and at most twice `MOST_AHEAD` entries of an index.
    """
    names = {row.pool_id for row in rows if row.pool_id is not None}
    known = _pools(connection, names, now_ms)
    ahead: dict[str, int] = {}
    for name in names:
        ahead |= _ahead(connection, name, [row for row in rows if row.pool_id == name])
    return [
        explain(BatchStatus(row.status), known.get(row.pool_id), ahead.get(row.id, 0))
        for row in rows
    ]


def _pools(connection: sa.Connection, names: Iterable[str], now_ms: int) -> Mapping[str, Pool]:
    wanted = sorted(names)
    if not wanted:
        return {}
    found = {}
    for row in connection.execute(sa.select(pools).where(pools.c.id.in_(wanted))):
        heard = row.reported_ms is not None and row.reported_ms > now_ms - STALE_MS
        found[row.id] = Pool(
            id=row.id,
            alive=row.executors_alive if heard else None,
            ready=row.executors_ready if heard else None,
            engine_revision=row.engine_revision,
        )
    return found


def _ahead(connection: sa.Connection, pool_id: str, rows: Sequence[Row]) -> dict[str, int]:
    """How many batches of a pool with lines to hand out come before each that has some itself."""
    waiting = sorted(row.seq for row in rows if _waits(row))
    if not waiting:
        return {}
    first, last = waiting[0], waiting[-1]
    query = sa.select(batches.c.seq).where(sa.text(WINDOW_WHERE), batches.c.pool_id == pool_id)
    before = query.where(batches.c.seq < first).limit(MOST_AHEAD).subquery()
    base = connection.scalar(sa.select(sa.func.count()).select_from(before)) or 0
    between = list(
        connection.scalars(
            query.where(batches.c.seq >= first, batches.c.seq < last)
            .order_by(batches.c.seq)
            .limit(MOST_AHEAD)
        )
        if last > first and base < MOST_AHEAD
        else ()
    )
    return {
        row.id: min(MOST_AHEAD, base + bisect_left(between, row.seq)) for row in rows if _waits(row)
    }


def _waits(row: Row) -> bool:
    """The condition of the window, for a row at hand."""
    return bool(
        row.status == BatchStatus.IN_PROGRESS
        and row.lines_cut < row.lines_total
        and row.sealed_ms is None
        and row.stopping_ms is None
    )
