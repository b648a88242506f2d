"""Statements on uploads and their parts. An upload past its time has ended, whatever its row says.

Every change is guarded by the state that it expects, so that an upload ends once only, and no part
is taken once it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from services.kit.wire.errors import InvalidRequestError, NotFoundError
from services.kit.wire.ids import ProjectId
from services.store.blobs import blobs_repo
from services.store.files import files_repo
from services.store.tables.core import blobs
from services.store.tables.uploads import PENDING_WHERE, upload_parts, uploads

Row = sa.Row[Any]

UPLOAD_SECONDS: Final = 3_600
"""How long an upload takes parts."""

MAX_PARTS: Final = 10_000
"""Parts of one upload: their list travels in one request and lies in one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewUpload:
    """What an upload's row is made of; sizes in bytes, times in Unix seconds."""

    id: str
    project_id: ProjectId
    purpose: str
    filename: str
    bytes: int
    created_at: int
    file_expires_seconds: int | None
    hash_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPart:
    """What a part's row is made of; its blobs are durable. Sizes in bytes."""

    id: str
    upload_id: str
    project_id: ProjectId
    bytes: int
    created_at: int
    blob: str
    index_blob: str | None
    digest: str


class Completed(NamedTuple):
    """A completed upload and the file that it became; None once that is gone."""

    upload: Row
    file: Row | None


def no_such_upload(upload_id: str) -> NotFoundError:
    """Return the error for an upload that does not exist in this project."""
    return NotFoundError(f"No such Upload object: {upload_id}", param="upload_id")


def status_of(row: Row, now_at: int) -> str:
    """Return an upload's status; it expires by itself, swept or not."""
    if row.status == "pending" and row.expires_at <= now_at:
        return "expired"
    status: str = row.status
    return status


def refuse_ended(row: Row, now_at: int) -> None:
    """Refuse what only a pending upload takes.

    Raises:
        InvalidRequestError: it has ended.
    """
    status = status_of(row, now_at)
    if status != "pending":
        raise InvalidRequestError(
            f"The Upload {row.id} is {status}; only a pending one can be changed. Create another.",
            param="upload_id",
        )


def insert(connection: sa.Connection, upload: NewUpload) -> Row:
    """Insert a pending upload."""
    connection.execute(
        uploads.insert().values(
            id=upload.id,
            project_id=upload.project_id,
            status="pending",
            purpose=upload.purpose,
            filename=upload.filename,
            bytes=upload.bytes,
            created_at=upload.created_at,
            expires_at=upload.created_at + UPLOAD_SECONDS,
            file_expires_seconds=upload.file_expires_seconds,
            hash_key=upload.hash_key,
        )
    )
    return connection.execute(sa.select(uploads).where(uploads.c.id == upload.id)).one()


def get(connection: sa.Connection, upload_id: str, project_id: ProjectId) -> Row:
    """Return an upload's row.

    Raises:
        NotFoundError: unknown, or another project's.
    """
    row = connection.execute(
        sa.select(uploads).where(uploads.c.id == upload_id, uploads.c.project_id == project_id)
    ).first()
    if row is None:
        raise no_such_upload(upload_id)
    return row


def parts_of(connection: sa.Connection, upload_id: str) -> Sequence[Row]:
    """Return all parts of an upload, in no order."""
    return connection.execute(
        sa.select(upload_parts).where(upload_parts.c.upload_id == upload_id)
    ).all()


def add_part(connection: sa.Connection, part: NewPart, *, most_bytes: int) -> None:
    """Add a part and make its blobs live.

    A part that repeats another word for word is not counted against the declared size: a client
    that lost the answer sends it again, and lists one of the two.

    Raises:
        InvalidRequestError: the upload has ended, or the part is more than it declared or than
            the limits allow.
    """
    upload = get(connection, part.upload_id, part.project_id)
    repeats = connection.execute(
        sa.select(upload_parts.c.id)
        .where(
            upload_parts.c.upload_id == part.upload_id,
            upload_parts.c.digest == part.digest,
            upload_parts.c.bytes == part.bytes,
        )
        .limit(1)
    ).first()
    distinct = part.bytes if repeats is None else 0
    upload = _change(
        connection,
        upload,
        part.created_at,
        parts=uploads.c.parts + 1,
        stored_bytes=uploads.c.stored_bytes + part.bytes,
        distinct_bytes=uploads.c.distinct_bytes + distinct,
    )
    _check_room(upload, most_bytes)
    names = [part.blob] if part.index_blob is None else [part.blob, part.index_blob]
    blobs_repo.make_live(connection, names)
    connection.execute(
        upload_parts.insert().values(
            id=part.id,
            upload_id=part.upload_id,
            project_id=part.project_id,
            bytes=part.bytes,
            created_at=part.created_at,
            blob=part.blob,
            index_blob=part.index_blob,
            digest=part.digest,
        )
    )


def _check_room(upload: Row, most_bytes: int) -> None:
    """Refuse an upload that has more, as its row is with the new part."""
    if upload.distinct_bytes > upload.bytes:
        raise too_much(upload)
    if upload.stored_bytes > most_bytes:
        raise InvalidRequestError(
            f"The parts of an Upload may have {most_bytes} bytes in all.", param="data"
        )
    if upload.parts > MAX_PARTS:
        raise InvalidRequestError(
            f"An Upload takes at most {MAX_PARTS} parts; send larger ones.", param="data"
        )


def too_much(upload: Row) -> InvalidRequestError:
    """Return the error for more bytes than declared."""
    return InvalidRequestError(
        f"The Upload was created with {upload.bytes} bytes, and its parts would have more.",
        param="data",
    )


def _change(connection: sa.Connection, upload: Row, now_at: int, **values: Any) -> Row:
    """Change a pending upload; the update locks its row until the commit.

    Raises:
        InvalidRequestError: it has ended.
    """
    changed = _try_change(connection, upload, now_at, **values)
    if changed is None:
        refuse_ended(get(connection, upload.id, upload.project_id), now_at)
        raise AssertionError("a pending upload could not be changed")
    return changed


def _try_change(connection: sa.Connection, upload: Row, now_at: int, **values: Any) -> Row | None:
    return connection.execute(
        uploads.update()
        .where(
            uploads.c.id == upload.id,
            uploads.c.status == "pending",
            uploads.c.expires_at > now_at,
        )
        .values(**values)
        .returning(*uploads.c)
    ).first()


def cancel(connection: sa.Connection, upload_id: str, project_id: ProjectId, now_at: int) -> Row:
    """Cancel an upload and drop its parts.

    Raises:
        NotFoundError: unknown, or another project's.
        InvalidRequestError: it has ended.
    """
    upload = get(connection, upload_id, project_id)
    row = _change(connection, upload, now_at, status="cancelled", ended_at=now_at)
    _drop_parts(connection, upload_id)
    return row


def expire_one(connection: sa.Connection, now_at: int) -> bool:
    """Expire one upload past its time and drop its parts; tell whether there was one."""
    upload_id = connection.scalar(
        sa.select(uploads.c.id)
        .where(sa.text(PENDING_WHERE), uploads.c.expires_at <= now_at)
        .limit(1)
    )
    if upload_id is None:
        return False
    expired = connection.execute(
        uploads.update()
        .where(uploads.c.id == upload_id, uploads.c.status == "pending")
        .values(status="expired", ended_at=now_at)
    )
    # Where another store ended it first, the parts are that one's to drop or to keep.
    if expired.rowcount == 1:
        _drop_parts(connection, upload_id)
    return True


def complete(
    connection: sa.Connection, upload: Row, file: files_repo.NewFile, *, completed_by: str
) -> Completed:
    """Make a file of an upload's parts, or return the one that an equal request made.

    The blobs of the file's parts stay as they are, only named by another row; all others go.

    Raises:
        InvalidRequestError: the upload has ended meanwhile, in another way.
    """
    row = _try_change(
        connection,
        upload,
        file.created_at,
        status="completed",
        ended_at=file.created_at,
        file_id=file.id,
        completed_by=completed_by,
    )
    if row is None:
        ended = get(connection, upload.id, upload.project_id)
        earlier = completed_before(connection, ended, completed_by, file.created_at)
        if earlier is None:
            refuse_ended(ended, file.created_at)
            raise AssertionError("a pending upload could not be completed")
        return earlier
    taken = {name for name, _ in file.parts}
    left = [part.blob for part in parts_of(connection, upload.id) if part.blob not in taken]
    blobs_repo.doom(connection, left)
    _doom_all(connection, upload.id, upload_parts.c.index_blob)
    connection.execute(upload_parts.delete().where(upload_parts.c.upload_id == upload.id))
    return Completed(row, files_repo.insert(connection, file))


def completed_before(
    connection: sa.Connection, upload: Row, completed_by: str, now_at: int
) -> Completed | None:
    """Return what an equal request made of this upload; None when there was none."""
    if upload.status != "completed" or upload.completed_by != completed_by:
        return None
    try:
        file = files_repo.get(connection, upload.file_id, upload.project_id, now_at)
    except NotFoundError:
        file = None
    return Completed(upload, file)


def _drop_parts(connection: sa.Connection, upload_id: str) -> None:
    """Doom all blobs of an upload's parts and forget the parts."""
    _doom_all(connection, upload_id, upload_parts.c.blob)
    _doom_all(connection, upload_id, upload_parts.c.index_blob)
    connection.execute(upload_parts.delete().where(upload_parts.c.upload_id == upload_id))


def _doom_all(connection: sa.Connection, upload_id: str, column: sa.Column[Any]) -> None:
    named = sa.select(column).where(upload_parts.c.upload_id == upload_id)
    connection.execute(blobs.update().where(blobs.c.name.in_(named)).values(state="doomed"))
