"""Statements on holds: while one stands, the sweeper of no store deletes a blob.

A backup takes one, then its snapshot of the rows, then copies what these name: whatever is dropped
meanwhile stays until the hold is released, or its time is up.
"""

from typing import Final

import sqlalchemy as sa

from services.store.tables.core import sweep_holds

HOLD_MS: Final = 300_000
"""So long at most blobs are kept for nothing after whoever held them was killed."""


def hold(connection: sa.Connection, hold_id: str, until_ms: int) -> None:
    """Keep every blob until `until_ms`, the store's time; again with the same id moves its end."""
    moved = connection.execute(
        sweep_holds.update().where(sweep_holds.c.id == hold_id).values(until_ms=until_ms)
    )
    if moved.rowcount == 0:
        connection.execute(sweep_holds.insert().values(id=hold_id, until_ms=until_ms))


def release(connection: sa.Connection, hold_id: str) -> None:
    """Let blobs be deleted again, as far as no other hold stands; harmless when it is gone."""
    connection.execute(sweep_holds.delete().where(sweep_holds.c.id == hold_id))


def forget_lapsed(connection: sa.Connection, now_ms: int) -> int:
    """Drop the rows of holds whose time is up; return how many."""
    lapsed = connection.execute(sweep_holds.delete().where(sweep_holds.c.until_ms <= now_ms))
    return lapsed.rowcount


def standing(now_ms: int) -> sa.Exists:
    """Return the condition that a hold stands, to be asked in the statement that it decides."""
    return sa.exists().where(sweep_holds.c.until_ms > now_ms)
