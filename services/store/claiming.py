"""Who finalizes which batch: leases, and patience with batches that end the stores they are in.

A claim counts a try before the work begins, in the same commit, so that it is known whatever dies
of it. Batches that were begun twice without an end run alone, last, and ever less often.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from services.store.domain.patience import SUSPECT_TRIES, wait_ms
from services.store.domain.state import BatchStatus
from services.store.models import FINALIZE_WHERE, batches
from services.store.sql.dialect import OthersDead

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


def waiting(connection: sa.Connection, asked: Claim, most: int) -> Sequence[str]:
    """Return up to `most` batches that may be begun now; a suspect comes alone."""
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


def claim(connection: sa.Connection, asked: Claim, most: int) -> list[Row]:
    """Take the lease of what waits and count a try of each; return their rows as they are then."""
    ids = waiting(connection, asked, most)
    tried = connection.execute(
        sa.select(batches.c.id, batches.c.tries).where(batches.c.id.in_(ids)).order_by(batches.c.id)
    ).all()
    for row in tried:
        connection.execute(
            batches.update()
            .where(batches.c.id == row.id)
            .values(
                finalize_holder=asked.holder,
                finalize_until_ms=asked.now_ms + asked.lease_ms,
                tries=row.tries + 1,
                retry_ms=asked.now_ms + wait_ms(row.tries + 1),
            )
        )
    rows = connection.execute(
        sa.select(batches).where(batches.c.id.in_(ids)).order_by(batches.c.sealed_ms)
    )
    return list(rows.all())


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
