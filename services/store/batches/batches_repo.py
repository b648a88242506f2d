"""Statements on batches: creation, look-up, and the transitions up to `in_progress`.

Every transition is one guarded update, with its timestamp, in one transaction; sealing and ending
are in `seal.py` and `finalizer.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from protos.nightshift.v1 import dispatch_pb2
from services.kit.wire.errors import ConflictError, NotFoundError
from services.kit.wire.ids import BatchId, ProjectId
from services.store.batches import several_models
from services.store.bus import outbox
from services.store.context import next_seq
from services.store.domain import state
from services.store.domain.cutter import ModelLines
from services.store.domain.state import BatchStatus
from services.store.tables.core import EXPIRY_WHERE, batches
from services.store.webhooks import deliveries_repo

Row = sa.Row[Any]

KEEP_SECONDS: Final = 3_600
"""How long after a batch's end a broken stream of its results goes on where it was. Later it starts
over from the end files. Only batches that were streamed cost the room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """What a batch's row is made of."""

    id: BatchId
    project_id: ProjectId
    endpoint: str
    input_file_id: str
    completion_window: str
    completion_window_seconds: int
    metadata: Mapping[str, str] | None
    output_expires_seconds: int | None
    key_id: str | None
    traceparent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What validation found: the batch's own view of its input."""

    model: str
    pool_id: str
    #: With their pools; empty where there is one model.
    models: Sequence[tuple[ModelLines, str]] = ()
    parts: Sequence[tuple[str, int]]
    index_blob: str
    lines: int
    bytes: int


def insert(connection: sa.Connection, batch: NewBatch, now_ms: int) -> Row:
    """Insert a batch, `validating`."""
    values: dict[str, object] = {
        "id": batch.id,
        "seq": next_seq(connection),
        "project_id": batch.project_id,
        "status": state.INITIAL.value,
        "endpoint": batch.endpoint,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "output_expires_seconds": batch.output_expires_seconds,
        "key_id": batch.key_id,
        "created_at": now_ms // 1000,
        "expires_ms": now_ms + batch.completion_window_seconds * 1000,
        "traceparent": batch.traceparent,
    }
    if batch.metadata is not None:
        # Left out, it is null; None would be JSON's.
        values["metadata"] = dict(batch.metadata)
    connection.execute(_INSERT, values)
    return _row(connection, batch.id)


# Made once, here and below: making a statement costs more than running it.
_INSERT: Final = batches.insert()
_ROW: Final = sa.select(batches).where(batches.c.id == sa.bindparam("batch_id"))
_GET: Final = _ROW.where(batches.c.project_id == sa.bindparam("of_project"))


def _row(connection: sa.Connection, batch_id: str) -> Row:
    return connection.execute(_ROW, {"batch_id": batch_id}).one()


def get(
    connection: sa.Connection, batch_id: str, project_id: ProjectId, *, param: str | None = None
) -> Row:
    """Return a batch's row; `param` names the request's field that holds the id.

    Raises:
        NotFoundError: unknown, or another project's.
    """
    row = connection.execute(_GET, {"batch_id": batch_id, "of_project": project_id}).first()
    if row is None:
        raise NotFoundError(f"No batch found with id '{batch_id}'.", param=param)
    return row


def list_page(
    connection: sa.Connection, *, project_id: ProjectId, after: str, limit: int
) -> tuple[list[Row], bool]:
    """Return up to `limit` batches, newest first, and whether there are more.

    Raises:
        NotFoundError: `after` is no batch of this project.
    """
    query = sa.select(batches).where(batches.c.project_id == project_id)
    if after:
        query = query.where(batches.c.seq < get(connection, after, project_id, param="after").seq)
    rows = list(connection.execute(query.order_by(batches.c.seq.desc()).limit(limit + 1)))
    return rows[:limit], len(rows) > limit


def _move_to(target: BatchStatus) -> sa.sql.dml.ReturningUpdate[Any]:
    """The statement that enters `target`; more values are parameters named like their columns."""
    values: dict[str, object] = {"version": batches.c.version + 1, "status": target.value}
    if target in state.TERMINAL:
        values["keep_until_ms"] = sa.case(
            (batches.c.keep_until_ms == 0, 0), else_=sa.bindparam("kept_until", type_=sa.BigInteger)
        )
    return (
        batches.update()
        .where(
            batches.c.id == sa.bindparam("of_batch"),
            batches.c.status.in_([status.value for status in state.sources(target)]),
        )
        .values(**values)
        .returning(batches.c.project_id)
    )


_MOVES: Final = {target: _move_to(target) for target in state.TIMESTAMP_COLUMN}


def move(
    connection: sa.Connection, batch_id: str, target: BatchStatus, now_ms: int, **values: object
) -> bool:
    """Enter `target` from wherever the drawing allows; tell whether it happened.

    Nothing moved means that the batch is there already or went elsewhere: the caller reads which.
    Every end of a batch comes through here, so that whoever asked is told of it: wake the loop
    `deliveries` once it is committed.
    """
    values |= {"of_batch": batch_id, state.TIMESTAMP_COLUMN[target]: now_ms // 1000}
    if target in state.TERMINAL:
        values["kept_until"] = now_ms + KEEP_SECONDS * 1000
    project_id = connection.scalar(_MOVES[target], values)
    if project_id is not None and target in state.TERMINAL:
        deliveries_repo.add(
            connection, batch_id=batch_id, project_id=project_id, end=target, now_ms=now_ms
        )
    return project_id is not None


def cancel(connection: sa.Connection, batch_id: str, project_id: ProjectId, now_ms: int) -> Row:
    """Ask for a batch to end; repeatable.

    Raises:
        NotFoundError: unknown, or another project's.
        ConflictError: it has ended otherwise.
    """
    row = get(connection, batch_id, project_id)
    outcome = state.cancel(BatchStatus(row.status))
    match outcome:
        case state.AlreadyThere():
            return row
        case state.Conflict():
            raise ConflictError(outcome.message)
        case state.Moved():
            # One that waits for what is missing need wait no more.
            retry_ms = 0 if row.fault is not None else row.retry_ms
            move(
                connection, batch_id, outcome.target, now_ms, stopping_ms=now_ms, retry_ms=retry_ms
            )
    event = dispatch_pb2.Event(
        kind=dispatch_pb2.EVENT_KIND_BATCH_CANCELLING,
        batch_id=batch_id,
        pool_id=row.pool_id or "",
    )
    outbox.emit(connection, event, project_id, now_ms)
    return _row(connection, batch_id)


_TO_VALIDATE: Final = (
    sa.select(batches)
    # Word for word the condition of an index, so that ended batches are not looked at.
    .where(
        sa.text(EXPIRY_WHERE),
        batches.c.status == BatchStatus.VALIDATING.value,
        batches.c.retry_ms <= sa.bindparam("now_ms"),
    )
    .order_by(batches.c.tries, batches.c.seq)
    .limit(sa.bindparam("most"))
)


def to_validate(connection: sa.Connection, limit: int, now_ms: int) -> list[Row]:
    """Return batches that wait to be validated, in order, those that were begun in vain last."""
    return list(connection.execute(_TO_VALIDATE, {"now_ms": now_ms, "most": limit}))


def last_seq(connection: sa.Connection) -> int:
    """Return the number of the newest batch; 0 where there is none."""
    return int(connection.scalar(sa.select(sa.func.max(batches.c.seq))) or 0)


def put_off(
    connection: sa.Connection,
    batch_id: str,
    *,
    tries: int,
    until_ms: int,
    fault: str | None = None,
) -> None:
    """Note how often validating a batch was begun in vain, when it is tried again, and why."""
    connection.execute(
        batches.update()
        .where(batches.c.id == batch_id, batches.c.status == BatchStatus.VALIDATING.value)
        .values(tries=tries, retry_ms=until_ms, fault=fault)
    )


def fail(
    connection: sa.Connection, batch_id: str, errors: Sequence[Mapping[str, object]], now_ms: int
) -> bool:
    """End a batch whose input is at fault; tell whether it still was validating."""
    return move(
        connection,
        batch_id,
        BatchStatus.FAILED,
        now_ms,
        errors=[dict(error) for error in errors],
        sealed_ms=now_ms,
        seal_outcome=BatchStatus.FAILED.value,
    )


def start(connection: sa.Connection, row: Row, found: Input, now_ms: int) -> bool:
    """Let a batch run; tell whether it still was validating."""
    moved = move(
        connection,
        row.id,
        BatchStatus.IN_PROGRESS,
        now_ms,
        model=found.model,
        pool_id=found.pool_id,
        mixed=bool(found.models),
        input_parts=[list(part) for part in found.parts],
        index_blob=found.index_blob,
        lines_total=found.lines,
        input_bytes=found.bytes,
        tries=0,
        retry_ms=0,
        fault=None,
    )
    if moved and found.models:
        several_models.insert(connection, row, found.models)
    if moved:
        for pool_id in sorted({found.pool_id, *(pool_id for _, pool_id in found.models)}):
            event = dispatch_pb2.Event(
                kind=dispatch_pb2.EVENT_KIND_BATCH_READY, batch_id=row.id, pool_id=pool_id
            )
            outbox.emit(connection, event, ProjectId(row.project_id), now_ms)
    return moved
