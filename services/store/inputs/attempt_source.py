"""Where the lines of an attempt are read from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from services.kit.wire.errors import ConflictError
from services.store.domain.results import Range
from services.store.inputs.input_reader import Parts
from services.store.tables.core import attempts, batches, chunks
from services.store.work import chunks_repo


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the lines of an attempt's chunk are read from."""

    lines: Sequence[Range]
    parts: Parts
    index_blob: str
    batch_id: str
    was_lost: bool
    """Whether the last try to read its input failed."""


_SOURCE: Final = (
    sa.select(
        chunks.c.lines,
        batches.c.id,
        batches.c.input_parts,
        batches.c.index_blob,
        batches.c.fault,
    )
    .join(attempts, attempts.c.chunk_id == chunks.c.id)
    .join(batches, batches.c.id == chunks.c.batch_id)
    .where(attempts.c.token == sa.bindparam("token"), attempts.c.closed_ms.is_(None))
)


def source_of(connection: sa.Connection, token: str) -> Source:
    """Return where an attempt reads its lines.

    Raises:
        ConflictError: the attempt is over, so there is nothing to read.
    """
    row = connection.execute(_SOURCE, {"token": token}).first()
    if row is None:
        raise ConflictError("This attempt is over.")
    return Source(
        lines=chunks_repo.unpack_ranges(row.lines),
        parts=[(name, size) for name, size in row.input_parts],
        index_blob=row.index_blob,
        batch_id=row.id,
        was_lost=row.fault is not None,
    )
