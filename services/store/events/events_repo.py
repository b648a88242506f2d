"""Statements on what streams of a batch's events are made of."""

from collections.abc import Collection, Sequence
from typing import Any, Final

import sqlalchemy as sa

from services.store.domain.event_cursor import Live
from services.store.domain.state import TERMINAL
from services.store.tables.core import batches, segments

Row = sa.Row[Any]

SEGMENTS: Final = 16
"""Most segments of one page: their records take some KiB each."""

# Later than any time; the end sets the true one.
_UNTIL_ITS_END: Final = 2**53


def keep_results(connection: sa.Connection, batch_id: str) -> None:
    """Keep the results of an open batch for a while after its end: a stream tells them now."""
    connection.execute(
        batches.update()
        .where(
            batches.c.id == batch_id,
            batches.c.keep_until_ms == 0,
            batches.c.status.not_in([status.value for status in TERMINAL]),
        )
        .values(keep_until_ms=_UNTIL_ITS_END)
    )


def segments_after(connection: sa.Connection, batch: Row, cursor: Live) -> list[Row]:
    """Return the next segments of a batch's row, in order of commit, without their payloads."""
    query = (
        sa.select(segments.c.id, segments.c.version, segments.c.records, segments.c.blob)
        .where(
            segments.c.batch_id == batch.id,
            segments.c.version >= cursor.version,
            segments.c.version <= batch.version,
        )
        .order_by(segments.c.version)
        .limit(SEGMENTS)
    )
    return list(connection.execute(query))


def payloads(connection: sa.Connection, ids: Collection[int]) -> dict[int, bytes]:
    """Return the payloads that stand in the rows of these segments."""
    if not ids:
        return {}
    rows = connection.execute(
        sa.select(segments.c.id, segments.c.payload).where(segments.c.id.in_(list(ids)))
    )
    return {row.id: row.payload for row in rows}


def versions(connection: sa.Connection, batch_ids: Sequence[str]) -> dict[str, int]:
    """Return the version of each of these batches."""
    rows = connection.execute(
        sa.select(batches.c.id, batches.c.version).where(batches.c.id.in_(list(batch_ids)))
    )
    return {row.id: row.version for row in rows}
