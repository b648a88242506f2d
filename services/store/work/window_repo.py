"""The window: batches that may run now, and the chunks cut from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from protos.nightshift.v1 import dispatch_pb2, work_pb2
from services.kit.wire.ids import IdGenerator
from services.store.batches import several_models
from services.store.domain.cutter import Piece, Records, fit
from services.store.domain.index.line_index import LineIndex
from services.store.tables.core import WINDOW_WHERE, batches, models
from services.store.work import chunks_repo, deaths_repo

Row = sa.Row[*tuple[Any, ...]]
Connection = sa.Connection

MAX_CUTS: Final = 64
BATCHES_PER_POOL: Final = 1_000
BATCHES: Final = 16_000
"""Batches of all pools together: more may be too large for a gRPC message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One chunk wanted: at most so many lines and input bytes, but at least one line.

    `pool_id` says for whom, where the batch has several pools.
    """

    batch_id: str
    pool_id: str
    max_lines: int
    max_bytes: int


_POOL_IDS: Final = sa.select(models.c.pool_id).distinct().order_by(models.c.pool_id)


def pool_ids(connection: sa.Connection) -> list[str]:
    """Return every pool that a model names."""
    return list(connection.scalars(_POOL_IDS))


_WINDOW: Final = (
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
        batches.c.lines_total.label("all_lines"),
        sa.literal(1).label("models"),
    )
    .where(
        sa.text(WINDOW_WHERE),
        batches.c.pool_id == sa.bindparam("pool_id"),
        batches.c.mixed.is_(False),
        batches.c.expires_ms > sa.bindparam("now_ms"),
        batches.c.retry_ms <= sa.bindparam("now_ms"),
        batches.c.project_id.not_in(sa.bindparam("held", expanding=True)),
    )
    .order_by(batches.c.seq)
    .limit(sa.bindparam("most"))
)


def window(
    connection: sa.Connection, *, pools: Sequence[str], limit: int, now_ms: int
) -> list[Row]:
    """Return the first `limit` batches of each pool that have lines left to cut, by `seq`.

    One that has several pools is there once for each, with the counts of that pool's lines.
    """
    found: list[Row] = []
    held = deaths_repo.held(connection, now_ms)
    for pool_id in pools:
        values = {
            "pool_id": pool_id,
            "now_ms": now_ms,
            "most": limit,
            "held": held.get(pool_id, []),
        }
        rows: list[Row] = list(connection.execute(_WINDOW, values))
        rows.extend(several_models.window_of(connection, values))
        found.extend(sorted(rows, key=lambda row: int(row.seq))[:limit])
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
        line_bytes_mean=row.input_bytes // max(1, row.all_lines),
        several_models=row.models > 1,
    )


_INDEXES: Final = sa.select(batches.c.id, batches.c.index_blob).where(
    batches.c.id.in_(sa.bindparam("batch_ids", expanding=True)),
    sa.text(WINDOW_WHERE),
    batches.c.retry_ms <= sa.bindparam("now_ms"),
)


def indexes_of(connection: sa.Connection, batch_ids: Sequence[str], now_ms: int) -> dict[str, str]:
    """Return the name of the line index of each of these batches that is in the window.

    That of one which has ended may be gone with its input.
    """
    rows = connection.execute(_INDEXES, {"batch_ids": list(batch_ids), "now_ms": now_ms})
    return {row.id: row.index_blob for row in rows if row.index_blob is not None}


_OPEN_BATCHES: Final = (
    sa.select(
        batches.c.id,
        batches.c.seq,
        batches.c.project_id,
        batches.c.pool_id,
        batches.c.lines_total,
        batches.c.lines_cut,
        batches.c.mixed,
    )
    .where(
        batches.c.id.in_(sa.bindparam("batch_ids", expanding=True)),
        sa.text(WINDOW_WHERE),
        batches.c.expires_ms > sa.bindparam("now_ms"),
        batches.c.retry_ms <= sa.bindparam("now_ms"),
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
    cutter = _Cutter(connection, list(rows.values()), indexes)
    held = deaths_repo.held(connection, now_ms)
    made = []
    for each in cuts:
        row = rows.get(each.batch_id)
        if row is not None and row.project_id in held.get(each.pool_id or row.pool_id, ()):
            # Since this window was read.
            continue
        taken = None if row is None else cutter.take(row, each)
        if row is None or taken is None:
            continue
        made.append(
            chunks_repo.new_chunk(
                chunk_id=f"chunk_{new_id()}",
                batch=row,
                pool_id=taken.pool_id,
                model=taken.model,
                lines=taken.piece.ranges,
                input_bytes=taken.piece.bytes,
                state=chunks_repo.OUT,
                alone=False,
                dispatched_ms=now_ms,
            )
        )
    chunks_repo.insert(connection, made)
    cutter.write()
    order = [str(values["id"]) for values in made]
    by_id = {each.chunk_id: each for each in chunks_repo.dispatches(connection, order)}
    return [by_id[chunk_id] for chunk_id in order]


_CUT_UP_TO: Final = (
    batches.update()
    .where(batches.c.id == sa.bindparam("of_batch"))
    .values(lines_cut=sa.bindparam("lines"))
)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Lines for one chunk. `model`: None where the batch has one only."""

    pool_id: str
    model: str | None
    piece: Piece


class _Cutter:
    """Moves along the lines of batches whose rows are locked."""

    def __init__(
        self, connection: Connection, rows: Sequence[Row], indexes: Mapping[str, LineIndex]
    ) -> None:
        self._connection = connection
        self._indexes = indexes
        self._at = {row.id: int(row.lines_cut) for row in rows if not row.mixed}
        self._mixed = several_models.Cursors(connection, [row.id for row in rows if row.mixed])

    def take(self, batch: Row, wanted: Cut) -> _Taken | None:
        """Take what goes into the next chunk; None when nothing is left for its pool."""
        records = self._indexes[batch.id].records
        if batch.mixed:
            return self._take_of_several(batch, records, wanted)
        first = self._at[batch.id]
        if first >= batch.lines_total:
            return None
        end = min(batch.lines_total, first + max(1, wanted.max_lines))
        count, size = fit(records["length"][first:end], wanted.max_bytes)
        self._at[batch.id] = first + count
        piece = Piece(ranges=[(first, count)], lines=count, bytes=size, next_line=first + count)
        return _Taken(batch.pool_id, None, piece)

    def _take_of_several(self, batch: Row, records: Records, wanted: Cut) -> _Taken | None:
        found = self._mixed.cut(
            batch.id,
            wanted.pool_id,
            records,
            max_lines=wanted.max_lines,
            max_bytes=wanted.max_bytes,
        )
        return None if found is None else _Taken(wanted.pool_id, *found)

    def write(self) -> None:
        """Write how far each batch is cut."""
        for batch_id, lines in {**self._at, **self._mixed.write()}.items():
            self._connection.execute(_CUT_UP_TO, {"of_batch": batch_id, "lines": lines})
