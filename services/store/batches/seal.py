"""Sealing: after it a batch takes no more results. One guarded update, whatever the reason."""

from typing import Any, Final

import sqlalchemy as sa

from protos.nightshift.v1 import dispatch_pb2
from services.kit.wire.ids import ProjectId
from services.store.bus import outbox
from services.store.domain.state import BatchStatus
from services.store.tables.core import attempts, batches, chunks

Row = sa.Row[*tuple[Any, ...]]

ENDED: Final = "ended"
"""Outcome of attempts that the seal closed."""


def outcome_when_done(status: str) -> BatchStatus:
    """Return where a batch goes whose last line is done while it has this status."""
    if status == BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED
    return BatchStatus.COMPLETED


# Further values are parameters named like their columns.
_SEAL: Final = (
    batches.update()
    .where(
        batches.c.id == sa.bindparam("of_batch"),
        batches.c.status == sa.bindparam("from_status"),
        batches.c.sealed_ms.is_(None),
    )
    # Tries are of waiting for an input that was missing; finalizing counts anew.
    .values(version=batches.c.version + 1, tries=0, retry_ms=0)
)
_CLOSE_CHUNKS: Final = (
    chunks.update()
    .where(chunks.c.batch_id == sa.bindparam("of_batch"), chunks.c.state != "done")
    .values(state="done")
)
_CLOSE_ATTEMPTS: Final = (
    attempts.update()
    .where(attempts.c.batch_id == sa.bindparam("of_batch"), attempts.c.closed_ms.is_(None))
    .values(closed_ms=sa.bindparam("at_ms"), outcome=ENDED)
)


def seal(connection: sa.Connection, batch: Row, outcome: BatchStatus, now_ms: int) -> bool:
    """Seal a batch and close what runs of it; tell whether it still was open.

    Args:
        connection: in a transaction; wake the loops `finalizer` and `outbox` once it is committed.
        batch: a row with `id`, `pool_id` and `project_id`.
        outcome: the end that finalizing leads to; `cancelled` for a batch that is `cancelling`,
            one of the others for a batch in progress.
        now_ms: the store's time.
    """
    values: dict[str, object] = {
        "of_batch": batch.id,
        "sealed_ms": now_ms,
        "seal_outcome": outcome.value,
    }
    source = BatchStatus.CANCELLING
    if outcome != BatchStatus.CANCELLED:
        source = BatchStatus.IN_PROGRESS
        values |= {"status": BatchStatus.FINALIZING.value, "finalizing_at": now_ms // 1000}
    sealed = connection.execute(_SEAL, {**values, "from_status": source.value})
    if sealed.rowcount != 1:
        return False
    close_work(connection, batch.id, now_ms)
    event = dispatch_pb2.Event(
        kind=dispatch_pb2.EVENT_KIND_BATCH_SEALED, batch_id=batch.id, pool_id=batch.pool_id or ""
    )
    outbox.emit(connection, event, ProjectId(batch.project_id), now_ms)
    return True


def close_work(connection: sa.Connection, batch_id: str, now_ms: int) -> None:
    """Mark the chunks of a sealed batch done and close its attempts."""
    connection.execute(_CLOSE_CHUNKS, {"of_batch": batch_id})
    connection.execute(_CLOSE_ATTEMPTS, {"of_batch": batch_id, "at_ms": now_ms})
