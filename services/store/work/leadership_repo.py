"""Who leads the schedulers: one row, taken by guarded updates, fenced by its term.

The store's clock judges, so the leaders' own clocks do not matter.
"""

from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from services.kit.wire.errors import StaleTermError
from services.store.tables.core import leadership

MAX_TTL_MS: Final = 30_000
_SLACK_MS: Final = 5_000
_NAME: Final = "scheduler"
_ROW: Final = leadership.c.name == _NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """Who leads after a call. `left_ms`: time left of the lease, not negative."""

    leader: bool
    term: int
    holder: str
    left_ms: int


def lead(connection: sa.Connection, holder: str, *, ttl_ms: int, now_ms: int) -> Leadership:
    """Renew the lease of `holder`, or take it where it is free; tell who leads.

    The term grows by one with every change of leader; who renews keeps his.
    """
    until = now_ms + min(max(ttl_ms, 1), MAX_TTL_MS)
    renewed = connection.execute(
        leadership.update().where(_ROW, leadership.c.holder == holder).values(until_ms=until)
    )
    if renewed.rowcount == 0:
        taken = connection.execute(
            leadership.update()
            .where(_ROW, sa.or_(leadership.c.until_ms <= now_ms, _set_back(now_ms)))
            .values(holder=holder, term=leadership.c.term + 1, until_ms=until)
        )
        if (
            taken.rowcount == 0
            and connection.scalar(sa.select(leadership.c.term).where(_ROW)) is None
        ):
            connection.execute(
                leadership.insert().values(name=_NAME, holder=holder, term=1, until_ms=until)
            )
    row = connection.execute(sa.select(leadership).where(_ROW)).one()
    return Leadership(
        leader=row.holder == holder,
        term=row.term,
        holder=row.holder,
        left_ms=max(0, row.until_ms - now_ms),
    )


def _set_back(now_ms: int) -> sa.ColumnElement[bool]:
    """No lease is so long: the clock was set back since it was taken."""
    return leadership.c.until_ms > now_ms + MAX_TTL_MS + _SLACK_MS


def resign(connection: sa.Connection, holder: str, *, term: int, now_ms: int) -> None:
    """End the lease of `holder` now; harmless when it leads no more."""
    connection.execute(
        leadership.update()
        .where(
            _ROW,
            leadership.c.holder == holder,
            leadership.c.term == term,
            leadership.c.until_ms > now_ms,
        )
        .values(until_ms=now_ms)
    )


_TERM: Final = sa.select(leadership.c.term, leadership.c.until_ms).where(_ROW)


def require_term(connection: sa.Connection, term: int, now_ms: int) -> None:
    """Refuse a caller whose leadership is over.

    Raises:
        StaleTermError: another term has begun, or the lease of this one has run out.
    """
    row = connection.execute(_TERM).first()
    if row is None or row.term != term:
        raise StaleTermError(f"Term {term} is over; ask for leadership again.")
    if row.until_ms <= now_ms:
        raise StaleTermError(f"The lease of term {term} has run out; renew it first.")
