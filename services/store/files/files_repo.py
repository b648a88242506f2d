"""Statements on files. Deleted and expired files are unknown to their project at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from services.kit.wire.errors import NotFoundError
from services.kit.wire.ids import FileId, ProjectId
from services.store.blobs import blobs_repo
from services.store.context import next_seq
from services.store.tables.core import DELETED_WHERE, EXPIRING_WHERE, OPEN_WHERE, batches, files

Row = sa.Row[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """What a file's row is made of; sizes in bytes, times in Unix seconds.

    Attributes:
        parts: (blob name, bytes) of each part, in order.
        parts_live: the parts' blobs are named by other rows, which this one takes the place of.
    """

    id: FileId
    project_id: ProjectId
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None
    parts: Sequence[tuple[str, int]]
    parts_live: bool = False
    index_blob: str | None = None
    of_batch_id: str | None = None
    of_kind: str | None = None


def insert(connection: sa.Connection, file: NewFile) -> Row:
    """Insert a file whose blobs are durable, and make them live."""
    names = [] if file.parts_live else [name for name, _ in file.parts]
    if file.index_blob is not None:
        names.append(file.index_blob)
    blobs_repo.make_live(connection, names)
    connection.execute(
        _INSERT,
        {
            "id": file.id,
            "seq": next_seq(connection),
            "project_id": file.project_id,
            "purpose": file.purpose,
            "filename": file.filename,
            "bytes": file.bytes,
            "status": "processed",
            "created_at": file.created_at,
            "expires_at": file.expires_at,
            "parts": [list(part) for part in file.parts],
            "index_blob": file.index_blob,
            "of_batch_id": file.of_batch_id,
            "of_kind": file.of_kind,
        },
    )
    return connection.execute(_ROW, {"file_id": file.id}).one()


# Made once, here and below: making a statement costs more than running it.
_INSERT: Final = files.insert()
_ROW: Final = sa.select(files).where(files.c.id == sa.bindparam("file_id"))


def _visible(
    project_id: ProjectId | sa.BindParameter[str], now_at: int | sa.BindParameter[int]
) -> sa.ColumnElement[bool]:
    return sa.and_(
        files.c.project_id == project_id,
        files.c.deleted_at.is_(None),
        sa.or_(files.c.expires_at.is_(None), files.c.expires_at > now_at),
    )


_GET: Final = _ROW.where(_visible(sa.bindparam("of_project"), sa.bindparam("now_at")))


def get(connection: sa.Connection, file_id: str, project_id: ProjectId, now_at: int) -> Row:
    """Return a file's row.

    Raises:
        NotFoundError: unknown, deleted, expired or another project's.
    """
    row = connection.execute(
        _GET, {"file_id": file_id, "of_project": project_id, "now_at": now_at}
    ).first()
    if row is None:
        raise NotFoundError(f"No such File object: {file_id}", param="id")
    return row


def list_page(
    connection: sa.Connection,
    *,
    project_id: ProjectId,
    now_at: int,
    purpose: str,
    after: str,
    limit: int,
    ascending: bool,
) -> tuple[list[Row], bool]:
    """Return up to `limit` files by order of creation and whether there are more.

    Raises:
        NotFoundError: `after` never was a file of this project; a deleted one still pages.
    """
    query = sa.select(files).where(_visible(project_id, now_at))
    if purpose:
        query = query.where(files.c.purpose == purpose)
    if after:
        seq = connection.scalar(
            sa.select(files.c.seq).where(files.c.id == after, files.c.project_id == project_id)
        )
        if seq is None:
            raise NotFoundError(f"No such File object: {after}", param="after")
        query = query.where(files.c.seq > seq if ascending else files.c.seq < seq)
    order = files.c.seq.asc() if ascending else files.c.seq.desc()
    rows = list(connection.execute(query.order_by(order).limit(limit + 1)))
    return rows[:limit], len(rows) > limit


def delete(connection: sa.Connection, file_id: str, project_id: ProjectId, now_at: int) -> None:
    """Delete a file; its blobs go once no open batch needs them.

    Raises:
        NotFoundError: unknown, deleted, expired or another project's.
    """
    deleted = connection.execute(
        files.update()
        .where(files.c.id == file_id, _visible(project_id, now_at))
        .values(deleted_at=now_at)
    )
    if deleted.rowcount != 1:
        raise NotFoundError(f"No such File object: {file_id}", param="id")


# Word for word the conditions of indexes, here and below, so that what has ended is not looked at.
_IN_USE: Final = sa.select(batches.c.input_file_id).where(sa.text(OPEN_WHERE))
_GONE: Final = (
    sa.and_(sa.text(DELETED_WHERE)),
    sa.and_(sa.text(EXPIRING_WHERE), files.c.expires_at <= sa.bindparam("now_at")),
)
"""Two ways to be gone, blobs not yet given up, each with its index."""
_TO_PURGE: Final = [
    sa.select(files.c.id, sa.func.json_array_length(files.c.parts))
    .where(gone, files.c.id.not_in(_IN_USE))
    .limit(sa.bindparam("most"))
    for gone in _GONE
]


def to_purge(connection: sa.Connection, now_at: int, limit: int) -> dict[str, int]:
    """Return files that are gone and that no open batch needs, and how many parts each has."""
    found: dict[str, int] = {}
    for query in _TO_PURGE:
        rows = connection.execute(query, {"now_at": now_at, "most": limit - len(found)})
        found.update((file_id, parts) for file_id, parts in rows)
    return found


def purge(connection: sa.Connection, file_ids: Sequence[str], now_at: int) -> int:
    """Doom the blobs of those of these files that may still go; return how many files."""
    gone = connection.execute(
        sa.select(files.c.id, files.c.parts, files.c.index_blob).where(
            files.c.id.in_(file_ids), sa.or_(*_GONE), files.c.id.not_in(_IN_USE)
        ),
        {"now_at": now_at},
    ).all()
    for row in gone:
        names = [name for name, _ in row.parts]
        blobs_repo.doom(connection, [*names, row.index_blob] if row.index_blob else names)
        connection.execute(files.update().where(files.c.id == row.id).values(purged_at=now_at))
    return len(gone)
