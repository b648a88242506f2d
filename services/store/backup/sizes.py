"""Which copied blobs are not as long as the copied rows say: the store had lost a piece of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson
import sqlalchemy as sa

from services.kit.wire.frames import RESULT_RECORD
from services.store.blobs.base import BlobMissingError, BlobUnreadableError
from services.store.blobs.reader import FolderReader, is_name
from services.store.domain.checks.result_check import end_of
from services.store.domain.index.line_index import IndexFormatError
from services.store.domain.index.part_index import PartIndex
from services.store.domain.state import TERMINAL
from services.store.tables.core import batches, files, segments
from services.store.tables.uploads import upload_parts

_ROWS: Final = 500
_ENDED: Final = [status.value for status in TERMINAL]

Row = sa.Row[*tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class _Size:
    """What a row says of a blob's size in bytes: exactly, or at least."""

    name: str
    size: int
    exact: bool = True


def damaged(connection: sa.Connection, blobs: FolderReader) -> list[str]:
    """Return the names of blobs that are there, and not as long as the rows need them.

    What the store makes again by itself, the line index of a file, is none of them. Rows that say
    nothing of the kind are for the check to name.
    """
    found = {each.name for each in _sizes(connection) if _differs(each, blobs)}
    found.update(_unreadable_indexes(connection, blobs))
    return sorted(found)


def _differs(wanted: _Size, blobs: FolderReader) -> bool:
    size = blobs.size(wanted.name) if is_name(wanted.name) else None
    if size is None:
        return False
    return size < wanted.size or (wanted.exact and size > wanted.size)


def _sizes(connection: sa.Connection) -> Iterator[_Size]:
    # As text: a row whose list is damaged is backed up like any other.
    parts = sa.type_coerce(files.c.parts, sa.Text)
    for (text,) in _rows(connection, sa.select(parts).where(files.c.purged_at.is_(None))):
        yield from _parts(text)
    for row in _rows(connection, sa.select(upload_parts.c.blob, upload_parts.c.bytes)):
        yield _Size(row.blob, row.bytes)
    results = (
        sa.select(segments.c.blob, segments.c.records)
        .join(batches, batches.c.id == segments.c.batch_id)
        .where(segments.c.blob.is_not(None), batches.c.status.not_in(_ENDED))
    )
    for row in _rows(connection, results):
        if len(row.records) % RESULT_RECORD.itemsize == 0:
            yield _Size(row.blob, end_of(np.frombuffer(row.records, RESULT_RECORD)), exact=False)


def _rows(connection: sa.Connection, query: sa.Select[Any]) -> Iterator[Row]:
    yield from connection.execute(query.execution_options(yield_per=_ROWS))


def _parts(text: str) -> Iterator[_Size]:
    try:
        for name, size in orjson.loads(text):
            yield _Size(name, int(size))
    except (ValueError, TypeError):
        return


def _unreadable_indexes(connection: sa.Connection, blobs: FolderReader) -> Iterator[str]:
    """Of parts of uploads: these say themselves how long they are."""
    query = sa.select(upload_parts.c.index_blob).where(upload_parts.c.index_blob.is_not(None))
    for (name,) in _rows(connection, query):
        size = blobs.size(name) if is_name(name) else None
        if size is None:
            continue
        try:
            PartIndex.from_bytes(blobs.read(name, 0, size))
        except (BlobMissingError, BlobUnreadableError, IndexFormatError):
            yield name
