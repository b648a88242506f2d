"""What a project's batches come to, by the key that created them."""

from typing import Any, Final

import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, common_pb2
from services.store.domain.results import COUNTED
from services.store.tables.core import batches
from services.store.tables.keys import api_keys

Row = sa.Row[Any]

_SUMMED: Final = ("lines_total", *COUNTED)


def by_key(connection: sa.Connection, project_id: str) -> list[batches_pb2.KeyUsage]:
    """Sum the batches of a project, or of all where it is empty; running ones as far as they are.

    Returns:
        one entry for each key that created a batch, by project and then by its first batch.
    """
    query = (
        sa.select(
            batches.c.project_id,
            batches.c.key_id,
            api_keys.c.name,
            sa.func.count().label("batches"),
            # PostgreSQL sums integers to numerics.
            *(sa.cast(sa.func.sum(batches.c[name]), sa.BigInteger).label(name) for name in _SUMMED),
        )
        .select_from(batches.outerjoin(api_keys, api_keys.c.id == batches.c.key_id))
        .group_by(batches.c.project_id, batches.c.key_id, api_keys.c.name)
        .order_by(batches.c.project_id, sa.func.min(batches.c.seq))
    )
    if project_id:
        query = query.where(batches.c.project_id == project_id)
    return [
        batches_pb2.KeyUsage(
            project_id=row.project_id,
            key_id=row.key_id,
            key_name=row.name or "",
            batches=row.batches,
            request_counts=counts_of(row),
            usage=usage_of(row),
        )
        for row in connection.execute(query)
    ]


def counts_of(row: Row) -> batches_pb2.RequestCounts:
    """Return the lines of a batch, or of several together, by outcome."""
    return batches_pb2.RequestCounts(
        total=row.lines_total, completed=row.completed, failed=row.failed
    )


def usage_of(row: Row) -> common_pb2.Usage:
    """Return the tokens of a batch, or of several together."""
    return common_pb2.Usage(
        input_tokens=row.input_tokens,
        cached_tokens=row.cached_tokens,
        output_tokens=row.output_tokens,
        reasoning_tokens=row.reasoning_tokens,
    )
