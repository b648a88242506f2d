"""Statements on chunks, and the messages that hand them out."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from protos.nightshift.v1 import common_pb2, dispatch_pb2
from services.kit.messages.bus import MESSAGE_VERSION
from services.store.db.clock import GIVEN_UP
from services.store.domain.results import Range, count_lines
from services.store.tables.core import batches, chunks

Row = sa.Row[*tuple[Any, ...]]

QUEUED: Final = "queued"
OUT: Final = "out"
DONE: Final = "done"


def pack_ranges(ranges: Iterable[Range]) -> bytes:
    """Return ranges as packed (first u32, count u32) pairs, little endian."""
    return np.array(list(ranges), dtype="<u4").tobytes()


def unpack_ranges(packed: bytes) -> list[Range]:
    """Return the ranges that `pack_ranges` packed."""
    pairs = np.frombuffer(packed, dtype="<u4").reshape(-1, 2).tolist()
    return [(first, count) for first, count in pairs]


def to_messages(ranges: Iterable[Range]) -> list[common_pb2.LineRange]:
    """Return ranges as messages."""
    return [common_pb2.LineRange(first=first, count=count) for first, count in ranges]


def from_messages(ranges: Iterable[common_pb2.LineRange]) -> list[Range]:
    """Return ranges from messages."""
    return [(each.first, each.count) for each in ranges]


def new_chunk(
    *,
    chunk_id: str,
    batch: Row,
    pool_id: str,
    model: str | None,
    lines: Sequence[Range],
    input_bytes: int,
    state: str,
    alone: bool,
    dispatched_ms: int | None,
    attempts: int = 0,
    deaths: int = 0,
    deaths_alone: int = 0,
) -> dict[str, object]:
    """Return the values of a chunk's row; one that is `out` is in its first dispatch.

    `model` is that of its lines in a batch of several, None in others.
    """
    return {
        "id": chunk_id,
        "batch_id": batch.id,
        "project_id": batch.project_id,
        "pool_id": pool_id,
        "model": model,
        "batch_seq": batch.seq,
        "lines": pack_ranges(lines),
        "first_line": lines[0][0],
        "line_count": count_lines(lines),
        "input_bytes": input_bytes,
        "state": state,
        "alone": alone,
        "dispatch": 1 if state == OUT else 0,
        "dispatched_ms": dispatched_ms,
        "attempts": attempts,
        "deaths": deaths,
        "deaths_alone": deaths_alone,
    }


_INSERT: Final = chunks.insert()


def insert(connection: sa.Connection, rows: Sequence[dict[str, object]]) -> None:
    """Insert chunks made by `new_chunk`."""
    if rows:
        connection.execute(_INSERT, list(rows))


_FINISH: Final = chunks.update().where(chunks.c.id == sa.bindparam("of_chunk")).values(state=DONE)


def finish(connection: sa.Connection, chunk_id: str) -> None:
    """Mark a chunk done: nothing of it is left to do."""
    connection.execute(_FINISH, {"of_chunk": chunk_id})


def give_up(
    connection: sa.Connection, chunk_id: str, dispatch: int, until_ms: int = GIVEN_UP
) -> None:
    """End the lease of a chunk's dispatch, so that the next reconcile hands it out again.

    With `until_ms`, the first one after that time does.
    """
    connection.execute(
        chunks.update()
        .where(
            chunks.c.id == chunk_id,
            chunks.c.dispatch == dispatch,
            chunks.c.state == OUT,
            chunks.c.lease_until_ms.is_not(None),
        )
        .values(lease_until_ms=until_ms)
    )


def queue_again(connection: sa.Connection, chunk_id: str, dispatch: int) -> None:
    """Have a chunk that runs alone wait for its turn again; what names this dispatch is void."""
    connection.execute(
        chunks.update()
        .where(chunks.c.id == chunk_id, chunks.c.dispatch == dispatch, chunks.c.state == OUT)
        .values(state=QUEUED, lease_until_ms=None)
    )


def raise_dispatch(connection: sa.Connection, chunk_ids: Sequence[str], now_ms: int) -> None:
    """Begin the next dispatch of these chunks; none of them has a lease then."""
    connection.execute(
        chunks.update()
        .where(chunks.c.id.in_(chunk_ids), chunks.c.state != DONE)
        .values(
            state=OUT,
            dispatch=chunks.c.dispatch + 1,
            dispatched_ms=now_ms,
            lease_until_ms=None,
        )
    )


_DISPATCHES: Final = (
    sa.select(
        chunks,
        batches.c.endpoint,
        sa.func.coalesce(chunks.c.model, batches.c.model).label("model_name"),
        batches.c.expires_ms,
        batches.c.traceparent,
    )
    .join(batches, batches.c.id == chunks.c.batch_id)
    .where(chunks.c.id.in_(sa.bindparam("chunk_ids", expanding=True)))
    .order_by(chunks.c.alone.desc(), chunks.c.batch_seq, chunks.c.first_line)
)


def dispatches(connection: sa.Connection, chunk_ids: Sequence[str]) -> list[dispatch_pb2.Dispatch]:
    """Return the messages of these chunks: those alone first, then by (`seq`, line)."""
    if not chunk_ids:
        return []
    rows = connection.execute(_DISPATCHES, {"chunk_ids": list(chunk_ids)})
    return [
        dispatch_pb2.Dispatch(
            version=MESSAGE_VERSION,
            batch_id=row.batch_id,
            chunk_id=row.id,
            dispatch=row.dispatch,
            pool_id=row.pool_id,
            lines=to_messages(unpack_ranges(row.lines)),
            line_count=row.line_count,
            input_bytes=row.input_bytes,
            endpoint=row.endpoint,
            model=row.model_name,
            expires_at_ms=row.expires_ms,
            alone=row.alone,
            traceparent=row.traceparent,
        )
        for row in rows
    ]
