"""Statements on pools: what the scheduler says of them, and what that means for a batch."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import sqlalchemy as sa

from services.store.batches import engines_repo, several_models
from services.store.domain.explanation import MOST_AHEAD, Explanation, Pool, explain
from services.store.domain.state import BatchStatus
from services.store.tables.core import WINDOW_WHERE, batches, pools

Row = sa.Row[Any]

STALE_MS: Final = 30_000
"""What was said longer ago than this is known no more."""
TROUBLE_LENGTH: Final = 500
"""Characters kept of why an engine does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """See `PoolReport`."""

    pool_id: str
    executors_alive: int
    executors_ready: int
    seats: int
    lines_per_second: float
    trouble: str | None = None


def note(connection: sa.Connection, reports: Iterable[Report], now_ms: int) -> None:
    """Note what is said of pools; unknown ones are left out."""
    for report in reports:
        values = asdict(report)
        pool_id = values.pop("pool_id")
        connection.execute(
            pools.update().where(pools.c.id == pool_id).values(**values, reported_ms=now_ms)
        )


def explanations(connection: sa.Connection, rows: Sequence[Row], now_ms: int) -> list[Explanation]:
    """Say what each of these batches (rows of one page) waits for and ran on, in their order.

    Of a batch of several pools it is that of the first pool that lacks executors, or else of the
    first that has lines to hand out. The cost is bounded: a row a pool, and for each pool at most
    twice `MOST_AHEAD` entries of an index.
    """
    waits = _waits_for(connection, rows)
    names = {row.pool_id for row in rows if row.pool_id is not None}.union(*waits.values())
    known = _pools(connection, names, now_ms)
    chosen = {row.id: _chosen(row, waits[row.id], known) for row in rows}
    ahead: dict[str, int] = {}
    for name in names:
        waiting = [row for row in rows if name in waits[row.id] and chosen[row.id] == name]
        ahead |= _ahead(connection, name, waiting)
    engines = engines_repo.of_batches(connection, rows)
    return [
        replace(
            explain(
                BatchStatus(row.status),
                known.get(chosen[row.id] or ""),
                ahead.get(row.id, 0),
                fault=row.fault,
                tries=row.tries,
                # Who works without keys is their own operator.
                for_operator=row.key_id is None,
            ),
            engines=engines.get(row.id, ()),
        )
        for row in rows
    ]


def _waits_for(connection: sa.Connection, rows: Sequence[Row]) -> dict[str, list[str]]:
    """The pools for which each batch has lines to hand out, in order of name."""
    waiting = [row for row in rows if _waits(row)]
    found: dict[str, list[str]] = {row.id: [] for row in rows}
    for row in waiting:
        if not row.mixed:
            found[row.id].append(row.pool_id)
    mixed = [row.id for row in waiting if row.mixed]
    if mixed:
        query = several_models.WAITING.where(batches.c.id.in_(mixed))
        for batch_id, pool_id, _ in sorted(connection.execute(query)):
            found[batch_id].append(pool_id)
    return found


def _chosen(row: Row, waits: Sequence[str], known: Mapping[str, Pool]) -> str | None:
    """The pool that says most about a batch."""
    idle = [name for name in waits if name in known and known[name].ready == 0]
    first: str | None = next(iter([*idle, *waits]), row.pool_id)
    return first


_POOLS: Final = sa.select(
    pools.c.id,
    pools.c.executors_alive,
    pools.c.executors_ready,
    pools.c.engine_revision,
    pools.c.reported_ms,
    pools.c.trouble,
).where(pools.c.id.in_(sa.bindparam("names", expanding=True)))


def _pools(connection: sa.Connection, names: Iterable[str], now_ms: int) -> dict[str, Pool]:
    wanted = sorted(names)
    if not wanted:
        return {}
    found = {}
    for row in connection.execute(_POOLS, {"names": wanted}):
        heard = row.reported_ms is not None and row.reported_ms > now_ms - STALE_MS
        found[row.id] = Pool(
            id=row.id,
            alive=row.executors_alive if heard else None,
            ready=row.executors_ready if heard else None,
            engine_revision=row.engine_revision,
            trouble=row.trouble if heard else None,
        )
    return found


def _between() -> sa.Subquery:
    """The `seq` of the batches with lines to hand out for a pool, from `low` on, before `high`.

    The first of them in order, `MOST_AHEAD` of one model and as many of several.
    """
    single = sa.select(batches.c.seq).where(
        sa.text(WINDOW_WHERE),
        batches.c.pool_id == sa.bindparam("pool_id"),
        batches.c.mixed.is_(False),
    )
    halves = []
    for query in (single, several_models.SEQS):
        seq = query.selected_columns[0]
        span = query.where(seq >= sa.bindparam("low"), seq < sa.bindparam("high"))
        half = span.order_by(seq).limit(sa.bindparam("most")).subquery()
        halves.append(sa.select(half.c.seq))
    return sa.union_all(*halves).subquery()


# Made once: making them costs more than running them.
_BETWEEN: Final = sa.select(_between().c.seq)
_BEFORE: Final = sa.select(sa.func.count()).select_from(_between())


def _ahead(connection: sa.Connection, pool_id: str, rows: Sequence[Row]) -> dict[str, int]:
    """How many batches with lines to hand out for a pool come before each of these."""
    if not rows:
        return {}
    first, last = min(row.seq for row in rows), max(row.seq for row in rows)
    span = {"pool_id": pool_id, "low": 0, "high": first, "most": MOST_AHEAD}
    before: int = connection.execute(_BEFORE, span).scalar_one()
    seqs: list[int] = []
    if last > first and before < MOST_AHEAD:
        seqs = sorted(connection.scalars(_BETWEEN, {**span, "low": first, "high": last}))
    return {row.id: min(MOST_AHEAD, before + bisect_left(seqs, row.seq)) for row in rows}


def _waits(row: Row) -> bool:
    """The condition of the window, for a row at hand."""
    return bool(
        row.status == BatchStatus.IN_PROGRESS
        and row.lines_cut < row.lines_total
        and row.sealed_ms is None
        and row.stopping_ms is None
    )
