"""Drops what only running a batch needed, once it has ended; a little at a time."""

from typing import Any, Final

import sqlalchemy as sa

from services.store.blobs import blobs_repo
from services.store.context import Context
from services.store.domain.state import TERMINAL
from services.store.tables.core import (
    SEALED_WHERE,
    attempts,
    batch_models,
    batches,
    bit_blocks,
    chunks,
    segments,
)

SEGMENTS_AT_ONCE: Final = 16
"""Rows with payloads below 256 KiB: at most 4 MiB of pages, which are overwritten in it."""
ROWS_AT_ONCE: Final = 1_000


# Made once, here and below: making a statement costs more than running it.
_ENDED: Final = (
    sa.select(batches.c.id)
    .where(
        sa.text(SEALED_WHERE),
        batches.c.status.in_([status.value for status in TERMINAL]),
        batches.c.keep_until_ms <= sa.bindparam("now_ms"),
    )
    .order_by(batches.c.keep_until_ms)
    .limit(1)
)


async def clear_some(context: Context) -> bool:
    """Take a step for a batch that ended and is kept no longer; tell whether there was one."""
    now_ms = context.now_ms()
    batch_id = await context.db.read(
        lambda connection: connection.scalar(_ENDED, {"now_ms": now_ms})
    )
    if batch_id is None:
        return False
    await context.db.write("batch.clear", lambda connection: _step(connection, batch_id, now_ms))
    return True


def _rows_of(key: sa.Column[Any]) -> tuple[sa.Select[tuple[Any]], sa.Delete]:
    """The statements that find up to `ROWS_AT_ONCE` rows of a batch by their key and drop them."""
    table = key.table
    assert isinstance(table, sa.Table)
    of_batch = table.c.batch_id == sa.bindparam("of_batch")
    if table is attempts:
        # Closed ones have no index of batches.
        of_batch = attempts.c.chunk_id.in_(
            sa.select(chunks.c.id).where(chunks.c.batch_id == sa.bindparam("of_batch"))
        )
    return (
        sa.select(key).where(of_batch).limit(ROWS_AT_ONCE),
        table.delete().where(of_batch, key.in_(sa.bindparam("keys", expanding=True))),
    )


_SEGMENTS: Final = (
    sa.select(segments.c.id, segments.c.blob)
    .where(segments.c.batch_id == sa.bindparam("of_batch"))
    .limit(SEGMENTS_AT_ONCE)
)
_DROP_SEGMENTS: Final = segments.delete().where(
    segments.c.id.in_(sa.bindparam("ids", expanding=True))
)
_ROWS: Final = [
    _rows_of(key)
    for key in (attempts.c.token, chunks.c.id, bit_blocks.c.block, batch_models.c.model)
]
_CLEARED: Final = (
    batches.update()
    .where(batches.c.id == sa.bindparam("of_batch"))
    .values(cleared_ms=sa.bindparam("at_ms"))
)


def _step(connection: sa.Connection, batch_id: str, now_ms: int) -> None:
    found = connection.execute(_SEGMENTS, {"of_batch": batch_id}).all()
    if found:
        blobs_repo.doom(connection, [row.blob for row in found if row.blob is not None])
        connection.execute(_DROP_SEGMENTS, {"ids": [row.id for row in found]})
        if len(found) == SEGMENTS_AT_ONCE:
            return
    for some, drop in _ROWS:
        keys = connection.scalars(some, {"of_batch": batch_id}).all()
        if keys:
            connection.execute(drop, {"of_batch": batch_id, "keys": keys})
        if len(keys) == ROWS_AT_ONCE:
            return
    connection.execute(_CLEARED, {"of_batch": batch_id, "at_ms": now_ms})
