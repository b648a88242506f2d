"""Who finalizes which batch: leases, and patience with batches that end the stores they are in.

A claim counts a try before the work begins, in the same commit, so that it is known whatever dies
of it. Batches that were begun twice without an end run alone, last, and ever less often.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from services.store.db.dialect import OthersDead
from services.store.domain.retry_budget import SUSPECT_TRIES, wait_ms
from services.store.domain.state import BatchStatus
from services.store.tables.core import FINALIZE_WHERE, batches

Row = sa.Row[*tuple[Any, ...]]

_STARVING_MS: Final = 30_000
"""A batch that has to run alone is let in before others that wait once it has waited so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who asks, and when.

    Attributes:
        holder: the name of the asking finalizer.
        running: batches that it works on already.
        others_dead: returns the condition that a holder is a store that is dead for certain.
        now_ms: the store's time.
        lease_ms: how long a claim lasts without being renewed.
    """

    holder: str
    running: frozenset[str]
    others_dead: OthersDead
    now_ms: int
    lease_ms: int


_DUE: Final = (
    sa.select(
        batches.c.id,
        batches.c.tries,
        batches.c.finalize_holder,
    )
    .where(
        sa.text(FINALIZE_WHERE),
        batches.c.id.not_in(sa.bindparam("running", expanding=True)),
        batches.c.retry_ms <= sa.bindparam("now_ms"),
    )
    .order_by(batches.c.sealed_ms)
    .limit(sa.bindparam("most"))
)


def waiting(connection: sa.Connection, asked: Claim, most: int) -> Sequence[str]:
    """Return up to `most` batches that may be begun now; a suspect comes alone."""
    first_due = connection.execute(
        _DUE,
        {"running": sorted(asked.running), "now_ms": asked.now_ms, "most": most + 1},
    ).all()
    if len(first_due) <= most and all(
        row.finalize_holder is None and row.tries < SUSPECT_TRIES for row in first_due
    ):
        # All that are due, and nothing to weigh: how it nearly always is.
        return [row.id for row in first_due]
    return _chosen(connection, asked, most)


def _chosen(connection: sa.Connection, asked: Claim, most: int) -> Sequence[str]:
    """The same, where some are held, suspects, or too many."""
    due = sa.and_(
        sa.text(FINALIZE_WHERE),
        batches.c.id.not_in(sorted(asked.running)),
        batches.c.retry_ms <= asked.now_ms,
        _free(connection, asked),
    )
    suspects = (
        sa.select(batches.c.id, batches.c.retry_ms)
        .where(due, batches.c.tries >= SUSPECT_TRIES)
        .order_by(batches.c.retry_ms)
        .limit(1)
    )
    suspect = connection.execute(suspects).first()
    if suspect is None or suspect.retry_ms > asked.now_ms - _STARVING_MS:
        first = (
            sa.select(batches.c.id)
            .where(due, batches.c.tries < SUSPECT_TRIES)
            .order_by(batches.c.sealed_ms)
            .limit(most)
        )
        found = connection.scalars(first).all()
        if found:
            return found
    return [] if suspect is None or asked.running else [suspect.id]


def _free(connection: sa.Connection, asked: Claim) -> sa.ColumnElement[bool]:
    return sa.or_(
        batches.c.finalize_holder.is_(None),
        batches.c.finalize_until_ms <= asked.now_ms,
        # Begun here in a turn that failed: what runs now is asked for by its id.
        batches.c.finalize_holder == asked.holder,
        asked.others_dead(connection, batches.c.finalize_holder),
    )


_OF_IDS: Final = batches.c.id.in_(sa.bindparam("ids", expanding=True))
_TRIED: Final = sa.select(batches.c.id, batches.c.tries).where(_OF_IDS).order_by(batches.c.id)
_TAKE: Final = (
    batches.update()
    .where(batches.c.id == sa.bindparam("of_batch"))
    .values(
        finalize_holder=sa.bindparam("holder"),
        finalize_until_ms=sa.bindparam("until_ms"),
        tries=sa.bindparam("new_tries"),
        retry_ms=sa.bindparam("next_ms"),
    )
)
_TAKEN: Final = sa.select(batches).where(_OF_IDS).order_by(batches.c.sealed_ms)


def claim(connection: sa.Connection, asked: Claim, most: int) -> list[Row]:
    """Take the lease of what waits and count a try of each; return their rows as they are then."""
    ids = list(waiting(connection, asked, most))
    for row in connection.execute(_TRIED, {"ids": ids}).all():
        connection.execute(
            _TAKE,
            {
                "of_batch": row.id,
                "holder": asked.holder,
                "until_ms": asked.now_ms + asked.lease_ms,
                "new_tries": row.tries + 1,
                "next_ms": asked.now_ms + wait_ms(row.tries + 1),
            },
        )
    return list(connection.execute(_TAKEN, {"ids": ids}).all())


def put_off(
    connection: sa.Connection,
    batch_id: str,
    holder: str,
    *,
    until_ms: int,
    soon_ms: int,
    fault: str,
) -> None:
    """Let go of a batch whose finalizing failed: it is tried again, here or elsewhere, later.

    The try did end, so that it counts for nothing.

    Args:
        connection: in a transaction.
        batch_id: the batch.
        holder: who failed; where another one holds it by now, nothing is changed.
        until_ms: when it is tried again, in the store's time.
        soon_ms: the same where it was cancelled meanwhile: it may end without what is missing.
        fault: why, for those who wait for the batch.
    """
    connection.execute(
        batches.update()
        .where(batches.c.id == batch_id, batches.c.finalize_holder == holder, batches.c.tries > 0)
        .values(
            finalize_holder=None,
            finalize_until_ms=None,
            tries=batches.c.tries - 1,
            retry_ms=sa.case(
                (batches.c.status == BatchStatus.CANCELLING.value, soon_ms), else_=until_ms
            ),
            fault=fault,
        )
    )
