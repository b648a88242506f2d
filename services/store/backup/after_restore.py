"""What a copy of a store's rows must forget: all that goes on elsewhere, or not at all.

A copy that is put to work meets processes and messages of another time: executors that hold
leases, a leader, a JetStream whose messages name chunks and numbers. None may pass for its own.
"""

from typing import Final

import sqlalchemy as sa

from services.store.domain.state import TERMINAL
from services.store.snapshot import copy_rows
from services.store.tables.core import attempts, batches, blobs, chunks, leadership, sweep_holds
from services.store.tables.webhooks import deliveries
from services.store.work.attempts_repo import Outcome
from services.store.work.chunks_repo import DONE, OUT

LEAP: Final = 1_000
"""Added to dispatches and terms. More than any gets between the copy and what came after it."""
COMMITS_LEAP: Final = 1_000_000
"""Added to the numbers of open batches' commits, of which there are more."""


def settle(connection: sa.Connection, now_ms: int) -> None:
    """Make every lease void and every number higher than any that is known outside.

    Args:
        connection: of the copy, in a transaction. May be done again, as each putting back does.
        now_ms: the time; numbers of events go on from it.
    """
    # Handed back and not lost: no line is to blame for a copy.
    connection.execute(
        attempts.update()
        .where(attempts.c.closed_ms.is_(None))
        .values(closed_ms=now_ms, outcome=Outcome.HANDED_BACK.value)
    )
    # A message of before says a lower dispatch, and one of after it would have had to be handed out
    # a thousand times.
    connection.execute(
        chunks.update().where(chunks.c.state != DONE).values(dispatch=chunks.c.dispatch + LEAP)
    )
    # What is out with a lease that is over is handed out by the next reconcile.
    connection.execute(chunks.update().where(chunks.c.state == OUT).values(lease_until_ms=0))
    connection.execute(leadership.update().values(term=leadership.c.term + LEAP, until_ms=0))
    # Who follows a batch and knows of later commits goes on with all that is recorded from now on.
    connection.execute(
        batches.update()
        .where(batches.c.status.not_in([status.value for status in TERMINAL]))
        .values(version=batches.c.version + COMMITS_LEAP)
    )
    connection.execute(batches.update().values(finalize_holder=None, finalize_until_ms=None))
    connection.execute(deliveries.update().values(lease_holder=None, lease_until_ms=None))
    connection.execute(sweep_holds.delete())
    # Their files are not copied: whoever was writing or deleting them does not know of the copy.
    connection.execute(blobs.delete().where(blobs.c.state != "live"))
    # No store tells a thousand events a second for as long as it lives.
    copy_rows.give_from(connection, max(copy_rows.numbers_given(connection), now_ms))
