"""The window: batches that may run now, and the chunks cut from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from protos.nightshift.v1 import dispatch_pb2, work_pb2
from services.kit.ids import IdGenerator
from services.store import chunks_repo
from services.store.domain.line_index import LineIndex
from services.store.models import WINDOW_WHERE, batches, models

Row = sa.Row[*tuple[Any, ...]]
Connection = sa.Connection

MAX_CUTS: Final = 64
BATCHES_PER_POOL: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One chunk wanted: at most so many lines and input bytes, but at least one line."""

    batch_id: str
    max_lines: int
    max_bytes: int


def pool_ids(connection: sa.Connection) -> list[str]:
    """Return every pool that a model names."""
    query = sa.select(models.c.pool_id).distinct().order_by(models.c.pool_id)
    return list(connection.scalars(query))


def window(
    connection: sa.Connection, *, pools: Sequence[str], limit: int, now_ms: int
) -> list[Row]:
    """Return the first `limit` batches of each pool that have lines left to cut, by `seq`."""
    found: list[Row] = []
    for pool_id in pools:
        found.extend(
            connection.execute(
                sa.select(
                    batches.c.id,
                    batches.c.seq,
                    batches.c.project_id,
                    batches.c.pool_id,
                    batches.c.lines_total,
                    batches.c.lines_cut,
                    batches.c.lines_done,
                    batches.c.expires_ms,
                    batches.c.input_bytes,
                )
                .where(
                    sa.text(WINDOW_WHERE),
                    batches.c.pool_id == pool_id,
                    batches.c.expires_ms > now_ms,
                )
                .order_by(batches.c.seq)
                .limit(limit)
            )
        )
    return sorted(found, key=lambda row: int(row.seq))


def to_proto(row: Row) -> work_pb2.WindowBatch:
    """Return a row of `window` as its message."""
    return work_pb2.WindowBatch(
        batch_id=row.id,
        seq=row.seq,
        project_id=row.project_id,
        pool_id=row.pool_id,
        lines_total=row.lines_total,
        lines_cut=row.lines_cut,
        lines_done=row.lines_done,
        expires_at_ms=row.expires_ms,
        line_bytes_mean=row.input_bytes // max(1, row.lines_total),
    )


def indexes_of(connection: sa.Connection, batch_ids: Sequence[str]) -> dict[str, str]:
    """Return the name of the line index of each of these batches that has one."""
    rows = connection.execute(
        sa.select(batches.c.id, batches.c.index_blob).where(batches.c.id.in_(batch_ids))
    )
    return {row.id: row.index_blob for row in rows if row.index_blob is not None}


_OPEN_BATCHES: Final = (
    sa.select(
        batches.c.id,
        batches.c.seq,
        batches.c.project_id,
        batches.c.pool_id,
        batches.c.lines_total,
        batches.c.lines_cut,
    )
    .where(
        batches.c.id.in_(sa.bindparam("batch_ids", expanding=True)),
        sa.text(WINDOW_WHERE),
        batches.c.expires_ms > sa.bindparam("now_ms"),
    )
    .order_by(batches.c.seq)
    .with_for_update()
)


def cut(
    connection: sa.Connection,
    cuts: Sequence[Cut],
    *,
    indexes: Mapping[str, LineIndex],
    new_id: IdGenerator,
    now_ms: int,
) -> list[dispatch_pb2.Dispatch]:
    """Cut the next lines of these batches into chunks, in the order wanted, and dispatch them.

    Returns one message for each cut that found lines and a batch still open.
    """
    wanted = sorted({each.batch_id for each in cuts} & indexes.keys())
    rows = {
        row.id: row
        for row in connection.execute(_OPEN_BATCHES, {"batch_ids": wanted, "now_ms": now_ms})
    }
    at = {batch_id: int(row.lines_cut) for batch_id, row in rows.items()}
    made = []
    for each in cuts:
        row = rows.get(each.batch_id)
        if row is None or at[row.id] >= row.lines_total:
            continue
        first = at[row.id]
        count, size = _fit(indexes[row.id], first, row.lines_total, each)
        at[row.id] = first + count
        made.append(
            chunks_repo.new_chunk(
                chunk_id=f"chunk_{new_id()}",
                batch=row,
                lines=[(first, count)],
                input_bytes=size,
                state=chunks_repo.OUT,
                alone=False,
                dispatched_ms=now_ms,
            )
        )
    chunks_repo.insert(connection, made)
    for batch_id, line in at.items():
        connection.execute(batches.update().where(batches.c.id == batch_id).values(lines_cut=line))
    order = [str(values["id"]) for values in made]
    by_id = {each.chunk_id: each for each in chunks_repo.dispatches(connection, order)}
    return [by_id[chunk_id] for chunk_id in order]


def _fit(index: LineIndex, first: int, total: int, wanted: Cut) -> tuple[int, int]:
    """How many lines from `first` fit, at least one, and their input bytes."""
    lengths = index.records["length"][first : min(total, first + max(1, wanted.max_lines))]
    ends = np.cumsum(lengths, dtype=np.int64)
    count = max(1, int(np.searchsorted(ends, wanted.max_bytes, side="right")))
    return count, int(ends[count - 1])
