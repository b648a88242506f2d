"""Statements on batches of several models: each model has a pool and a cursor of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from services.store.domain.cutter import ModelLines, Piece, Records, cut_model
from services.store.tables.core import UNCUT_WHERE, WINDOW_WHERE, batch_models, batches

Row = sa.Row[Any]


def insert(connection: sa.Connection, batch: Row, models: Sequence[tuple[ModelLines, str]]) -> None:
    """Note the models of a batch (a row) with their pools; nothing of them is cut yet."""
    connection.execute(
        batch_models.insert(),
        [
            {
                "batch_id": batch.id,
                "model": model.name,
                "project_id": batch.project_id,
                "pool_id": pool_id,
                "seq": batch.seq,
                "model_id": model.model_id,
                "lines": model.lines,
                "next_line": model.first,
            }
            for model, pool_id in models
        ],
    )


WAITING: Final = (
    sa.select(batches.c.id, batch_models.c.pool_id, batch_models.c.seq)
    .join(batch_models, batch_models.c.batch_id == batches.c.id)
    # Word for word the condition of the index of what is not cut.
    .where(sa.text(UNCUT_WHERE), sa.text(WINDOW_WHERE))
    .group_by(batch_models.c.seq, batches.c.id, batch_models.c.pool_id)
)
"""Batches of several models, once for each pool for which they have lines to cut."""


SEQS: Final = (
    sa.select(batch_models.c.seq)
    .join(batches, batches.c.id == batch_models.c.batch_id)
    .where(
        sa.text(UNCUT_WHERE),
        sa.text(WINDOW_WHERE),
        batch_models.c.pool_id == sa.bindparam("pool_id"),
    )
    .distinct()
)
"""The `seq` of all that have lines to cut for a pool."""


def _total(column: sa.Column[int]) -> sa.ColumnElement[int]:
    # PostgreSQL sums integers to numerics.
    return sa.cast(sa.func.sum(column), sa.BigInteger)


_WINDOW: Final = (
    WAITING.add_columns(
        batches.c.project_id,
        _total(batch_models.c.lines).label("lines_total"),
        _total(batch_models.c.cut).label("lines_cut"),
        batches.c.lines_done,
        batches.c.expires_ms,
        batches.c.input_bytes,
        batches.c.lines_total.label("all_lines"),
        sa.func.count().label("models"),
    )
    .where(
        batch_models.c.pool_id == sa.bindparam("pool_id"),
        batches.c.expires_ms > sa.bindparam("now_ms"),
        batches.c.retry_ms <= sa.bindparam("now_ms"),
        batches.c.project_id.not_in(sa.bindparam("held", expanding=True)),
    )
    .order_by(batch_models.c.seq)
    .limit(sa.bindparam("most"))
)


def window_of(connection: sa.Connection, values: Mapping[str, Any]) -> list[Row]:
    """Return the first batches that have lines to cut for a pool; counts are the pool's own."""
    return list(connection.execute(_WINDOW, dict(values)))


@dataclass(slots=True)
class _Cursor:
    model: str
    model_id: int
    pool_id: str
    lines: int
    cut: int
    next_line: int


class Cursors:
    """Where the models of some batches are cut up to; their batches' rows are locked."""

    def __init__(self, connection: sa.Connection, batch_ids: Sequence[str]) -> None:
        """Read those of these batches."""
        self._connection = connection
        self._of: dict[str, list[_Cursor]] = {}
        if not batch_ids:
            return
        query = sa.select(batch_models).where(batch_models.c.batch_id.in_(list(batch_ids)))
        for row in connection.execute(query):
            self._of.setdefault(row.batch_id, []).append(
                _Cursor(row.model, row.model_id, row.pool_id, row.lines, row.cut, row.next_line)
            )

    def cut(
        self, batch_id: str, pool_id: str, records: Records, *, max_lines: int, max_bytes: int
    ) -> tuple[str, Piece] | None:
        """Take the next lines of a batch for a pool, of the model whose turn it is by line.

        Returns the model and its lines; None when nothing is left for the pool.
        """
        left = [
            each
            for each in self._of.get(batch_id, ())
            if each.pool_id == pool_id and each.cut < each.lines
        ]
        if not left:
            return None
        cursor = min(left, key=lambda each: each.next_line)
        piece = cut_model(
            records, cursor.model_id, cursor.next_line, max_lines=max_lines, max_bytes=max_bytes
        )
        assert piece is not None  # the counts say that there are some
        cursor.next_line = piece.next_line
        cursor.cut += piece.lines
        return cursor.model, piece

    def write(self) -> Mapping[str, int]:
        """Write where they stand; return the lines of each batch that are in chunks."""
        values = [
            {"of_batch": batch_id, "of_model": each.model, "to": each.cut, "on": each.next_line}
            for batch_id, cursors in self._of.items()
            for each in cursors
        ]
        if values:
            self._connection.execute(_ADVANCE, values)
        return {
            batch_id: sum(each.cut for each in cursors) for batch_id, cursors in self._of.items()
        }


_ADVANCE: Final = (
    batch_models.update()
    .where(
        batch_models.c.batch_id == sa.bindparam("of_batch"),
        batch_models.c.model == sa.bindparam("of_model"),
    )
    .values(cut=sa.bindparam("to"), next_line=sa.bindparam("on"))
)
