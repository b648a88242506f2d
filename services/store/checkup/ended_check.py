"""Batches that have ended, against their end files."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import sqlalchemy as sa

from services.store.blobs.base import BlobMissingError, BlobUnreadableError
from services.store.checkup.batches_check import facts, ids
from services.store.checkup.blobs_check import Blobs, unreadable
from services.store.checkup.files_check import parts_of
from services.store.checkup.report import Kind
from services.store.checkup.rows_read import View
from services.store.domain.checks.batch_check import BatchFacts, row_faults
from services.store.domain.checks.fault import Fault
from services.store.domain.end_check import outcome_fault
from services.store.tables.core import (
    attempts,
    batch_models,
    batches,
    bit_blocks,
    chunks,
    files,
    segments,
)

Row = sa.Row[*tuple[Any, ...]]

_READ_BYTES: Final = 1024 * 1024
_LEAST_LINE_BYTES: Final = 90
"""No line of an end file is shorter: its ids alone take more than half of it."""
_BY_HAND: Final = "Stop nightshift, run the statement, and check again."
_RUN_AGAIN: Final = (
    "Restore the directory from a backup, or run the batch's input again: its results are kept "
    "nowhere else once it has ended."
)
_ONLY_WHILE_OPEN: Final = (segments, attempts, chunks, bit_blocks, batch_models)


class EndedBatches:
    """Checks batches that have ended."""

    def __init__(self, view: View, blobs: Blobs, kind: Kind, *, deep: bool) -> None:
        """Check batches of `view`; deep reads their end files."""
        self._view = view
        self._blobs = blobs
        self._kind = kind
        self._deep = deep

    def check(self) -> None:
        """Check all of them."""
        for page in ids(self._view, ended=True):
            with self._view.snapshot() as connection:
                rows = connection.execute(
                    sa.select(batches).where(batches.c.id.in_(page)).order_by(batches.c.seq)
                ).all()
                ends = _end_files(connection, page)
                left = _left_over(connection, page)
                # Of those that are not cleared yet, which may be for long where a store died.
                self._blobs.named.add(connection.scalars(_segment_blobs(page)))
            for row in rows:
                self._check(facts(BatchFacts, row), ends.get(row.id, []), left.get(row.id, []))

    def _check(self, batch: BatchFacts, ends: Sequence[Row], left: Sequence[str]) -> None:
        self._kind.count(batch.status)
        self._kind.step()
        self._kind.extend(row_faults(batch))
        found = list(_end_faults(batch, ends))
        self._kind.extend(found)
        if left:
            self._kind.add(_left_fault(batch, left))
        if self._deep and not found and all(row.purged_at is None for row in ends):
            self._check_lines(batch, {row.of_kind: row for row in ends})

    def _check_lines(self, batch: BatchFacts, ends: dict[str, Row]) -> None:
        """Look for each line of the batch in its end files."""
        try:
            what = outcome_fault(
                batch.id,
                batch.lines_total,
                self._lines(ends.get("output")),
                self._lines(ends.get("error")),
            )
        except BlobMissingError:
            # Dropped meanwhile; where it should be there, the check of files tells.
            return
        except BlobUnreadableError as error:
            self._kind.add(unreadable(batch.id, error))
            return
        self._kind.count("lines read", batch.lines_total)
        if what is not None:
            self._kind.add(Fault(subject=batch.id, what=what, mend=_RUN_AGAIN))

    def _lines(self, row: Row | None) -> Iterator[bytes]:
        parts = None if row is None else parts_of(row)
        begun: list[bytes] = []
        for piece in self._view.pieces(parts or (), _READ_BYTES):
            self._kind.step(0)
            first, *others = piece.split(b"\n")
            begun.append(first)
            if others:
                # Of a long line one piece after the other: each must not be copied for each.
                yield b"".join(begun)
                *lines, rest = others
                yield from lines
                begun = [rest]
        if any(begun):
            yield b"".join(begun)


def _segment_blobs(batch_ids: Sequence[str]) -> sa.Select[tuple[str]]:
    return sa.select(segments.c.blob).where(
        segments.c.batch_id.in_(batch_ids), segments.c.blob.is_not(None)
    )


def _end_files(connection: sa.Connection, batch_ids: Sequence[str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in connection.execute(sa.select(files).where(files.c.of_batch_id.in_(batch_ids))):
        found.setdefault(row.of_batch_id, []).append(row)
    return found


def _left_over(connection: sa.Connection, batch_ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the tables that still have rows of batches which were cleared."""
    found: dict[str, list[str]] = {}
    for table in _ONLY_WHILE_OPEN:
        has_row = sa.exists().where(table.c.batch_id == batches.c.id)
        query = sa.select(batches.c.id).where(
            batches.c.id.in_(batch_ids), batches.c.cleared_ms.is_not(None), has_row
        )
        for batch_id in connection.scalars(query):
            found.setdefault(batch_id, []).append(table.name)
    return found


def _end_faults(batch: BatchFacts, ends: Sequence[Row]) -> Iterator[Fault]:
    there = {row.of_kind: row for row in ends}
    lines = {"output": batch.completed, "error": batch.lines_total - batch.completed}
    for kind, count in lines.items():
        column = f"{kind}_file_id"
        named, row = getattr(batch, column), there.get(kind)
        is_there = None if row is None else row.id
        if named != is_there:
            yield Fault(
                subject=batch.id,
                what=f"names {named or 'no file'} as its {kind} file, but it is"
                f" {is_there or 'not there'}",
                mend=_RUN_AGAIN if row is None else _BY_HAND,
                sql="" if row is None else batch.update(**{column: row.id}),
            )
        elif row is not None and row.bytes < count * _LEAST_LINE_BYTES:
            yield Fault(
                subject=batch.id,
                what=f"its {kind} file, {row.id}, has {row.bytes} bytes: too few for {count} lines",
                mend=_RUN_AGAIN,
            )


def _left_fault(batch: BatchFacts, tables: Sequence[str]) -> Fault:
    return Fault(
        subject=batch.id,
        what=f"was cleared, and still has rows in {', '.join(tables)}, which take room",
        mend=_BY_HAND + " The store clears it again then.",
        sql=batch.update(cleared_ms=None),
    )
