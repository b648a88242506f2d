"""Files: their parts, their sizes, their line indexes, and the parts of uploads."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import sqlalchemy as sa

from services.store.blobs.base import BlobMissingError, BlobUnreadableError
from services.store.checkup.blobs_check import Blobs, Claim, states, unreadable
from services.store.checkup.report import Kind
from services.store.checkup.rows_read import View
from services.store.domain import end_check
from services.store.domain.checks import index_check, statement
from services.store.domain.checks.fault import Fault
from services.store.domain.index.line_index import IndexFormatError, LineIndex, LineIndexer
from services.store.domain.index.part_index import PartIndex
from services.store.settings import StoreSettings
from services.store.tables.core import files
from services.store.tables.uploads import upload_parts, uploads

Row = sa.Row[*tuple[Any, ...]]
Parts = Sequence[tuple[str, int]]

PAGE: Final = 100
_READ_BYTES: Final = 4 * 1024 * 1024
_LONG_LINE: Final = 1024 * 1024
"""Longer lines are not read but for a deep check."""
_BY_HAND: Final = "Stop nightshift, run the statement, and check again."
_UPLOAD_AGAIN: Final = (
    "delete the file, upload it again, and cancel the batches that have not ended on it."
)
_INDEX_AGAIN: Final = (
    "Stop nightshift, delete blobs/{name}, and start it: the store makes the index again of the "
    "content. Where the content is what is damaged, restore that from a backup; without one: "
)
_RUN_AGAIN: Final = (
    "delete the file and run its batch's input again, since results are kept nowhere else once it "
    "ends."
)


def parts_of(row: Row) -> list[tuple[str, int]] | None:
    """Return a file's parts; None where its row holds none that can be."""
    found: list[tuple[str, int]] = []
    for part in row.parts if isinstance(row.parts, list) else [None]:
        if not (isinstance(part, list) and len(part) == 2):
            return None
        name, size = part
        if not (isinstance(name, str) and isinstance(size, int) and size >= 0):
            return None
        found.append((name, size))
    return found


class Files:
    """Checks every file whose content is kept."""

    def __init__(self, view: View, blobs: Blobs, settings: StoreSettings, *, deep: bool) -> None:
        """Check files of `view`; deep makes their indexes again."""
        self._view = view
        self._blobs = blobs
        self._settings = settings
        self._deep = deep

    def check(self, kind: Kind, indexes: Kind) -> None:
        """Check all files, and the line indexes of inputs."""
        last = 0
        while True:
            with self._view.snapshot() as connection:
                rows = connection.execute(
                    sa.select(files)
                    .where(files.c.seq > last, files.c.purged_at.is_(None))
                    .order_by(files.c.seq)
                    .limit(PAGE)
                ).all()
                claims = {row.id: list(_claims(row)) for row in rows}
                known = states(
                    connection, [claim.name for some in claims.values() for claim in some]
                )
            if not rows:
                return
            for row in rows:
                self._check_file(row, claims[row.id], known, kind, indexes)
            last = rows[-1].seq

    def _check_file(
        self, row: Row, claims: list[Claim], known: dict[str, str], kind: Kind, indexes: Kind
    ) -> None:
        kind.count("end files" if row.of_batch_id else "uploaded")
        kind.count("bytes", row.bytes)
        kind.step()
        found = list(self._blobs.faults([each for each in claims if not each.derived], known))
        kind.extend(found)
        for fault in self._blobs.faults([each for each in claims if each.derived], known):
            if not fault.blob:
                kind.add(fault)
                found.append(fault)
        parts = parts_of(row)
        if parts is None:
            kind.add(_row_fault(row, "its list of parts cannot be read", ""))
            return
        size = sum(size for _, size in parts)
        if size != row.bytes:
            sql = statement.update("files", {"id": row.id}, bytes=size)
            kind.add(_row_fault(row, f"has {row.bytes} bytes, and parts of {size}", sql))
        if found:
            return
        try:
            if row.of_batch_id is not None:
                kind.extend(self._end_faults(row, parts))
            if row.index_blob is not None:
                self._check_index(row, parts, indexes)
        except BlobMissingError:
            # Dropped while it was read, or else `Blobs` had told of it.
            return
        except BlobUnreadableError as error:
            kind.add(unreadable(row.id, error))

    def _end_faults(self, row: Row, parts: Parts) -> Iterator[Fault]:
        begin = self._view.read_span(parts, 0, len(end_check.BEGIN))
        end = self._view.read_span(parts, max(0, row.bytes - 1), 1)
        if begin != end_check.BEGIN or end != b"\n":
            yield Fault(
                subject=row.id,
                what="is an end file, but does not begin and end as one",
                mend=f"Restore its blobs from a backup. Without one: {_RUN_AGAIN}",
            )

    # --- line indexes -------------------------------------------------------------------------

    def _check_index(self, row: Row, parts: Parts, kind: Kind) -> None:
        size = self._view.blobs.size(row.index_blob)
        try:
            data = b"" if size is None else self._view.blobs.read(row.index_blob, 0, size)
            index = LineIndex.from_bytes(data)
        except (IndexFormatError, BlobUnreadableError) as error:
            if not self._blobs.is_live(row.index_blob):
                return
            why = error.why if isinstance(error, BlobUnreadableError) else error
            trouble = "is gone" if size is None else f"cannot be read ({why})"
            kind.note(
                f"{row.id}: its line index, blobs/{row.index_blob}, {trouble}; the store makes it "
                "again of the content when it needs it next"
            )
            return
        kind.count("read")
        what = self._index_fault(index, row, parts, kind)
        if what is not None:
            kind.add(
                Fault(
                    subject=row.id,
                    what=f"its line index, blobs/{row.index_blob}, {what}",
                    mend=_INDEX_AGAIN.format(name=row.index_blob) + _UPLOAD_AGAIN,
                )
            )

    def _index_fault(self, index: LineIndex, row: Row, parts: Parts, kind: Kind) -> str | None:
        kind.count("lines", index.lines)
        fault = index_check.table_fault(index, row.bytes)
        if fault is None:
            fault = self._sample_fault(index, parts)
        if fault is None and self._deep:
            fault = index_check.difference(index, self._made_again(index, parts, kind))
        return fault

    def _sample_fault(self, index: LineIndex, parts: Parts) -> str | None:
        for ordinal in index_check.samples(index):
            offset, length = index.span(ordinal)
            if length > _LONG_LINE:
                continue
            near = index_check.NEIGHBOUR_BYTES
            start = max(0, offset - near)
            data = self._view.read_span(parts, start, offset - start + length + near)
            at = offset - start
            fault = index_check.line_fault(
                index,
                ordinal,
                before=data[:at],
                line=data[at : at + length],
                after=data[at + length :],
            )
            if fault is not None:
                return fault
        return None

    def _made_again(self, index: LineIndex, parts: Parts, kind: Kind) -> LineIndex:
        max_lines, max_line_bytes = index_check.limits_of(index, self._settings.max_line_bytes)
        indexer = LineIndexer(max_lines=max_lines, max_line_bytes=max_line_bytes, key=b"")
        for piece in self._view.pieces(parts, _READ_BYTES):
            indexer.feed(piece)
            kind.step(0)
        return indexer.finish()


def _claims(row: Row) -> Iterator[Claim]:
    is_end = row.of_batch_id is not None
    for number, (name, size) in enumerate(parts_of(row) or ()):
        yield Claim(
            subject=row.id,
            role="its content" if len(row.parts) == 1 else f"part {number} of its content",
            name=name,
            project_id=row.project_id,
            size=size,
            mend=_RUN_AGAIN if is_end else _UPLOAD_AGAIN,
        )
    if row.index_blob is not None:
        yield Claim(
            subject=row.id,
            role="its line index",
            name=row.index_blob,
            project_id=row.project_id,
            mend=_UPLOAD_AGAIN,
            derived=True,
        )


def _row_fault(row: Row, what: str, sql: str) -> Fault:
    mend = _BY_HAND if sql else "Restore nightshift.db from a backup."
    return Fault(subject=row.id, what=what, mend=mend, sql=sql)


# --- uploads --------------------------------------------------------------------------------------


def check_uploads(view: View, blobs: Blobs, kind: Kind) -> None:
    """Check uploads against their parts, and these against their blobs."""
    last = ""
    while True:
        with view.snapshot() as connection:
            rows = connection.execute(
                sa.select(uploads).where(uploads.c.id > last).order_by(uploads.c.id).limit(PAGE)
            ).all()
            ended = [row.file_id for row in rows if row.file_id is not None]
            made = set(connection.scalars(sa.select(files.c.id).where(files.c.id.in_(ended))))
            sums = _sums(connection, [row.id for row in rows])
        if not rows:
            return
        for row in rows:
            kind.count(row.status)
            kind.step()
            kind.extend(_upload_faults(row, sums.get(row.id, (0, 0)), made))
            if row.status == "pending":
                _check_parts(view, blobs, kind, row.id)
        last = rows[-1].id


def _sums(connection: sa.Connection, ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    query = (
        sa.select(
            upload_parts.c.upload_id,
            sa.func.count().label("parts"),
            sa.func.sum(upload_parts.c.bytes).label("size"),
        )
        .where(upload_parts.c.upload_id.in_(ids))
        .group_by(upload_parts.c.upload_id)
    )
    return {row.upload_id: (row.parts, int(row.size)) for row in connection.execute(query)}


def _upload_faults(row: Row, sums: tuple[int, int], made: set[str]) -> Iterator[Fault]:
    parts, size = sums
    if row.status != "pending" and parts:
        yield Fault(
            subject=row.id,
            what=f"is {row.status} and still has {parts} parts",
            mend=_BY_HAND + " What they took is deleted then.",
            sql=statement.delete("upload_parts", upload_id=row.id),
        )
    if row.status == "pending" and (row.parts, row.stored_bytes) != (parts, size):
        yield Fault(
            subject=row.id,
            what=f"counts {row.parts} parts of {row.stored_bytes} bytes, and has {parts} of {size}",
            mend=_BY_HAND,
            sql=statement.update("uploads", {"id": row.id}, parts=parts, stored_bytes=size),
        )
    if row.file_id is not None and row.file_id not in made:
        yield Fault(
            subject=row.id,
            what=f"is completed as {row.file_id}, which is not there",
            mend="Restore nightshift.db from a backup, or upload the file again.",
        )


def _check_parts(view: View, blobs: Blobs, kind: Kind, upload_id: str) -> None:
    with view.snapshot() as connection:
        rows = connection.execute(
            sa.select(upload_parts).where(upload_parts.c.upload_id == upload_id)
        ).all()
        claims = {row.id: list(_part_claims(row)) for row in rows}
        known = states(connection, [claim.name for some in claims.values() for claim in some])
    for row in rows:
        kind.count("parts")
        found = list(blobs.faults(claims[row.id], known))
        if not found and row.index_blob is not None:
            found = list(_part_index_faults(view, row))
        kind.extend(found)


def _part_claims(row: Row) -> Iterator[Claim]:
    for role, name, size in (
        ("its content", row.blob, row.bytes),
        ("its index", row.index_blob, None),
    ):
        if name is not None:
            yield Claim(
                subject=row.id,
                role=role,
                name=name,
                project_id=row.project_id,
                size=size,
                mend=f"cancel {row.upload_id} and begin another upload.",
            )


def _part_index_faults(view: View, row: Row) -> Iterator[Fault]:
    try:
        size = view.blobs.size(row.index_blob) or 0
        index = PartIndex.from_bytes(view.blobs.read(row.index_blob, 0, size))
    except BlobMissingError:
        return
    except BlobUnreadableError as error:
        yield unreadable(row.id, error)
        return
    except IndexFormatError as error:
        trouble = f"cannot be read: {error}"
    else:
        if index.size == row.bytes:
            return
        trouble = f"is of a part of {index.size} bytes, not {row.bytes}"
    yield Fault(
        subject=row.id,
        what=f"its index, blobs/{row.index_blob}, {trouble}",
        mend=f"Cancel {row.upload_id} and begin another upload.",
        blob=row.index_blob,
    )
