"""Drops what only running a batch needed, once it has ended; a little at a time."""

from typing import Any, Final

import sqlalchemy as sa

from services.store import blobs_repo
from services.store.context import Context
from services.store.domain.state import TERMINAL
from services.store.models import (
    SEALED_WHERE,
    attempts,
    batch_models,
    batches,
    bit_blocks,
    chunks,
    segments,
)

SEGMENTS_AT_ONCE: Final = 64
"""Rows with payloads below 256 KiB: at most 16 MiB of pages a transaction."""
ROWS_AT_ONCE: Final = 1_000


async def clear_some(context: Context) -> bool:
    """Take a step for a batch that ended and is kept no longer; tell whether there was one."""
    now_ms = context.now_ms()
    query = (
        sa.select(batches.c.id)
        .where(
            sa.text(SEALED_WHERE),
            batches.c.status.in_([status.value for status in TERMINAL]),
            batches.c.keep_until_ms <= now_ms,
        )
        .order_by(batches.c.keep_until_ms)
        .limit(1)
    )
    batch_id = await context.db.read(lambda connection: connection.scalar(query))
    if batch_id is None:
        return False
    await context.db.write("batch.clear", lambda connection: _step(connection, batch_id, now_ms))
    return True


def _step(connection: sa.Connection, batch_id: str, now_ms: int) -> None:
    found = connection.execute(
        sa.select(segments.c.id, segments.c.blob)
        .where(segments.c.batch_id == batch_id)
        .limit(SEGMENTS_AT_ONCE)
    ).all()
    if found:
        blobs_repo.doom(connection, [row.blob for row in found if row.blob is not None])
        connection.execute(segments.delete().where(segments.c.id.in_([row.id for row in found])))
        if len(found) == SEGMENTS_AT_ONCE:
            return
    keys: tuple[sa.Column[Any], ...] = (
        attempts.c.token,
        chunks.c.id,
        bit_blocks.c.block,
        batch_models.c.model,
    )
    for key in keys:
        if _delete(connection, key, batch_id) == ROWS_AT_ONCE:
            return
    connection.execute(batches.update().where(batches.c.id == batch_id).values(cleared_ms=now_ms))


def _delete(connection: sa.Connection, key: sa.Column[Any], batch_id: str) -> int:
    """Delete up to `ROWS_AT_ONCE` of a batch's rows by their key; return how many."""
    table = key.table
    assert isinstance(table, sa.Table)
    some = connection.scalars(
        sa.select(key).where(table.c.batch_id == batch_id).limit(ROWS_AT_ONCE)
    ).all()
    if some:
        connection.execute(table.delete().where(table.c.batch_id == batch_id, key.in_(some)))
    return len(some)
