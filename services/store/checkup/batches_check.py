"""Batches that have not ended, against their input, their results, chunks and attempts.

Each batch is looked at in one snapshot, so that it may run meanwhile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from services.kit.wire.frames import RESULT_RECORD
from services.store.blobs.base import BlobMissingError, BlobUnreadableError
from services.store.blobs.reader import is_name
from services.store.checkup.blobs_check import Blobs, Claim, states, unreadable
from services.store.checkup.report import Kind
from services.store.checkup.rows_read import View
from services.store.domain.checks import statement
from services.store.domain.checks.batch_check import BatchFacts, row_faults
from services.store.domain.checks.chunk_check import (
    AttemptFacts,
    ChunkFacts,
    attempt_faults,
    chunk_faults,
)
from services.store.domain.checks.cut_check import Cut, ModelFacts
from services.store.domain.checks.fault import Fault, spoken
from services.store.domain.checks.result_check import Results, SegmentFacts, end_of
from services.store.domain.checks.statement import Sql
from services.store.domain.end_check import is_whole_line
from services.store.domain.index.line_index import IndexFormatError, LineIndex
from services.store.domain.state import TERMINAL
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
Facts = TypeVar("Facts")

PAGE: Final = 200
_SEGMENT_PAGE: Final = 64
_READ_BYTES: Final = 4 * 1024 * 1024
"""A segment that is no longer is read whole."""
_BY_HAND: Final = "Stop nightshift, run the statement, and check again."
_RUN_LINES_AGAIN: Final = (
    "stop nightshift, forget these results by the statement, and check again: it then says how to "
    "let their lines run again."
)
_END_WITHOUT: Final = (
    "cancel the batch, or wait for its expires_at: it then ends with all else, and with these "
    "lines in its error file as result_lost."
)
_ENDED: Final = [status.value for status in TERMINAL]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Where what is found of open batches goes."""

    batches: Kind
    results: Kind
    chunks: Kind
    attempts: Kind


def facts(kind: type[Facts], row: Row) -> Facts:
    """Return a row as the values that are checked."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # all are dataclasses
    return kind(**{name: getattr(row, name) for name in names})


def ids(view: View, *, ended: bool) -> Iterator[list[str]]:
    """Yield pages of ids of batches that have ended, or that have not, by order of creation."""
    last = 0
    where = batches.c.status.in_(_ENDED) if ended else batches.c.status.not_in(_ENDED)
    while True:
        with view.snapshot() as connection:
            rows = connection.execute(
                sa.select(batches.c.id, batches.c.seq)
                .where(where, batches.c.seq > last)
                .order_by(batches.c.seq)
                .limit(PAGE)
            ).all()
        if not rows:
            return
        yield [row.id for row in rows]
        last = rows[-1].seq


class OpenBatches:
    """Checks batches that have not ended."""

    def __init__(self, view: View, blobs: Blobs, kinds: Kinds, *, deep: bool) -> None:
        """Check batches of `view`; deep reads their results."""
        self._view = view
        self._blobs = blobs
        self._kinds = kinds
        self._deep = deep

    def check(self) -> None:
        """Check all of them."""
        for page in ids(self._view, ended=False):
            for batch_id in page:
                self._check(batch_id)

    def _check(self, batch_id: str) -> None:
        kinds = self._kinds
        with self._view.snapshot() as connection:
            row = connection.execute(sa.select(batches).where(batches.c.id == batch_id)).one()
            batch = facts(BatchFacts, row)
            if batch.is_ended:
                return
            kinds.batches.count(batch.status)
            if row.fault is not None:
                kinds.batches.note(f"{batch_id} waits: {row.fault}")
            kinds.batches.step()
            kinds.batches.extend(row_faults(batch))
            kinds.batches.extend(_input_faults(connection, batch, row))
            results = Results(batch)
            claims: list[Claim] = []
            for segment in _segments(connection, batch_id):
                kinds.results.count("segments")
                kinds.results.step()
                found = list(results.add(segment))
                kinds.results.extend(found)
                if segment.blob is not None and not found:
                    claims.append(_segment_claim(batch, segment))
            known = states(connection, [claim.name for claim in claims])
            kinds.results.extend(results.faults(_blocks(connection, batch_id)))
            done = results.done()
            kinds.results.count("lines done", int(done.sum()))
            models = _all(connection, ModelFacts, batch_models, batch_id, batch_models.c.model)
            cut = Cut(batch, models, self._model_ids(batch) if batch.mixed else None)
            kinds.batches.extend(cut.faults())
            its_chunks = _all(connection, ChunkFacts, chunks, batch_id, chunks.c.id)
            kinds.chunks.count("open", sum(chunk.is_open for chunk in its_chunks))
            kinds.chunks.count("done", sum(not chunk.is_open for chunk in its_chunks))
            kinds.chunks.extend(chunk_faults(batch, its_chunks, cut, done))
            its_attempts = _all(connection, AttemptFacts, attempts, batch_id, attempts.c.token)
            running = sum(attempt.closed_ms is None for attempt in its_attempts)
            kinds.attempts.count("open", running)
            kinds.attempts.count("closed", len(its_attempts) - running)
            kinds.attempts.extend(attempt_faults(batch, its_chunks, its_attempts))
        kinds.results.extend(self._blobs.faults(claims, known))
        if self._deep:
            self._check_payloads(batch_id)

    def _model_ids(self, batch: BatchFacts) -> "npt.NDArray[np.uint16] | None":
        """The model of each line, as the input's index has it; where that is gone, files tell."""
        name = batch.index_blob
        if not is_name(name):
            return None
        try:
            data = self._view.blobs.read(str(name), 0, self._view.blobs.size(str(name)) or 0)
            ids: npt.NDArray[np.uint16] = LineIndex.from_bytes(data).records["model"]
        except (BlobMissingError, BlobUnreadableError, IndexFormatError):
            return None
        return ids[: batch.lines_total]

    # --- payloads ---------------------------------------------------------------------------------

    def _check_payloads(self, batch_id: str) -> None:
        """See that each result is one line; a segment at a time, as far as it is still there."""
        with self._view.snapshot() as connection:
            numbers = connection.scalars(
                sa.select(segments.c.id).where(segments.c.batch_id == batch_id)
            ).all()
        for number in numbers:
            with self._view.snapshot() as connection:
                row = connection.execute(sa.select(segments).where(segments.c.id == number)).first()
            if row is None or len(row.records) % RESULT_RECORD.itemsize:
                continue
            self._kinds.results.step()
            records = np.frombuffer(row.records, RESULT_RECORD)
            try:
                wrong = self._wrong_lines(row, records)
            except BlobMissingError:
                continue
            except BlobUnreadableError as error:
                self._kinds.results.add(unreadable(batch_id, error))
                continue
            if wrong:
                self._kinds.results.add(_payload_fault(batch_id, number, wrong))

    def _wrong_lines(self, row: Row, records: "np.ndarray[Any, Any]") -> list[int]:
        """Return the results of a segment that are not one line each."""
        payload = row.payload
        size = end_of(records)
        if row.blob is not None and size <= _READ_BYTES:
            payload = self._view.blobs.read(row.blob, 0, size)

        def pieces(offset: int, length: int) -> Iterator[bytes]:
            if payload is not None:
                yield payload[offset : offset + length]
                return
            for start in range(offset, offset + length, _READ_BYTES):
                most = min(_READ_BYTES, offset + length - start)
                yield self._view.blobs.read(row.blob, start, most)

        return [
            line
            for line, offset, length in records[["line", "offset", "length"]].tolist()
            if not is_whole_line(pieces(offset, length), length)
        ]


def _payload_fault(batch_id: str, number: int, wrong: Sequence[int]) -> Fault:
    return Fault(
        subject=batch_id,
        what=f"segment {number} of results is damaged: {spoken(wrong)} are not one line each",
        mend="Stop nightshift, forget these results by the statement, and check again: it then "
        "says how to let their lines run again.",
        sql=statement.delete("segments", id=number),
    )


def _segments(connection: sa.Connection, batch_id: str) -> Iterator[SegmentFacts]:
    last = 0
    while True:
        rows = connection.execute(
            sa.select(
                segments.c.id,
                segments.c.version,
                segments.c.first_line,
                segments.c.last_line,
                segments.c.records,
                segments.c.blob,
                sa.func.length(segments.c.payload).label("size"),
            )
            .where(segments.c.batch_id == batch_id, segments.c.id > last)
            .order_by(segments.c.id)
            .limit(_SEGMENT_PAGE)
        ).all()
        if not rows:
            return
        for row in rows:
            yield facts(SegmentFacts, row)
        last = rows[-1].id


def _segment_claim(batch: BatchFacts, segment: SegmentFacts) -> Claim:
    mend, sql = _RUN_LINES_AGAIN, statement.delete("segments", id=segment.id)
    if batch.sealed_ms is not None:
        mend, sql = _END_WITHOUT, ""
    return Claim(
        subject=batch.id,
        role=f"the results of {spoken([segment.first_line, segment.last_line])}",
        name=str(segment.blob),
        project_id=batch.project_id,
        least=end_of(np.frombuffer(segment.records, RESULT_RECORD)),
        mend=mend,
        sql=sql,
    )


def _blocks(connection: sa.Connection, batch_id: str) -> dict[int, bytes]:
    rows = connection.execute(
        sa.select(bit_blocks.c.block, bit_blocks.c.bits).where(bit_blocks.c.batch_id == batch_id)
    )
    return {row.block: row.bits for row in rows}


def _all(
    connection: sa.Connection, kind: type[Facts], table: sa.Table, batch_id: str, key: Any
) -> list[Facts]:
    columns = [table.c[field.name] for field in fields(kind)]  # type: ignore[arg-type]  # all are dataclasses
    query = sa.select(*columns).where(table.c.batch_id == batch_id).order_by(key)
    return [facts(kind, row) for row in connection.execute(query)]


def _input_faults(connection: sa.Connection, batch: BatchFacts, row: Row) -> Iterator[Fault]:
    """A batch that runs has the parts of its input file, which stay while it does."""
    if batch.in_progress_at is None:
        return
    file = connection.execute(
        sa.select(files.c.parts, files.c.index_blob, files.c.purged_at).where(
            files.c.id == row.input_file_id
        )
    ).first()
    if file is None or file.purged_at is not None:
        yield Fault(
            subject=batch.id,
            what=f"runs on {row.input_file_id}, whose content was dropped",
            mend="Cancel it: what is finished is in its output file. Upload the input again.",
        )
    elif (file.parts, file.index_blob) != (row.input_parts, row.index_blob):
        yield Fault(
            subject=batch.id,
            what=f"names other blobs as its input than {row.input_file_id} has",
            mend=_BY_HAND,
            sql=batch.update(
                input_parts=Sql("(SELECT parts FROM files WHERE files.id = input_file_id)"),
                index_blob=Sql("(SELECT index_blob FROM files WHERE files.id = input_file_id)"),
            ),
        )
