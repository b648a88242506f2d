"""Statements on executors: who they are, and how they leave their attempts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from protos.nightshift.v1 import dispatch_pb2
from services.kit.process.log import get_logger
from services.kit.wire.errors import ConflictError
from services.kit.wire.ids import DEFAULT_PROJECT, IdGenerator
from services.store.admin import models_repo
from services.store.bus import outbox
from services.store.db.clock import FAR_MS, GIVEN_UP
from services.store.domain.results import Range, count_lines
from services.store.domain.retry_budget import fault_wait_ms
from services.store.domain.state import BatchStatus
from services.store.tables.core import batches, executors
from services.store.work import attempts_repo, chunks_repo, quarantine
from services.store.work.attempts_repo import Outcome

_log = get_logger(__name__)

_TROUBLE_LENGTH: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """What an executor says of itself; see `RegisterExecutorRequest`."""

    id: str
    incarnation: str
    pool_id: str
    models: tuple[str, ...]
    endpoints: tuple[str, ...]
    context_length: int | None
    engine_revision: str


def register(
    connection: sa.Connection, executor: Executor, *, new_id: IdGenerator, now_ms: int
) -> None:
    """Record an executor, its pool and its models; take apart what its last process left open.

    A process that ended in order had handed everything back, so what is open was lost.

    Raises:
        ConflictError: a model of that name is served by another pool.
    """
    now_at = now_ms // 1000
    models_repo.put_pool(connection, executor.pool_id, now_at, executor.engine_revision or None)
    for name in executor.models:
        models_repo.put_model(
            connection,
            name=name,
            pool_id=executor.pool_id,
            endpoints=executor.endpoints,
            context_length=executor.context_length,
            now_at=now_at,
        )
    values = {
        "incarnation": executor.incarnation,
        "pool_id": executor.pool_id,
        "engine_revision": executor.engine_revision,
        "registered_at": now_at,
    }
    known = connection.execute(
        executors.update().where(executors.c.id == executor.id).values(**values)
    )
    if known.rowcount == 0:
        connection.execute(executors.insert().values(id=executor.id, **values))
    left = attempts_repo.open_of_others(
        connection, executor.id, not_incarnation=executor.incarnation
    )
    quarantine.take_apart(
        connection,
        [quarantine.loss_of(attempt) for attempt in left],
        Outcome.LOST,
        new_id=new_id,
        now_ms=now_ms,
    )
    event = dispatch_pb2.Event(kind=dispatch_pb2.EVENT_KIND_EXECUTOR, pool_id=executor.pool_id)
    outbox.emit(connection, event, DEFAULT_PROJECT, now_ms)


def require_latest(connection: sa.Connection, executor_id: str, incarnation: str) -> None:
    """See that no later process has taken the executor's name: two would undo each other's work.

    The later one works on. Incarnations are ordered by the time at which they began.

    Raises:
        ConflictError: one has.
    """
    latest = connection.scalar(_INCARNATION, {"executor_id": executor_id})
    if latest is None or latest <= incarnation:
        return
    _log.error("executor_name_taken", executor=executor_id, earlier=incarnation, later=latest)
    raise ConflictError(
        f"A later process (incarnation {latest}) has registered under the name of this executor, "
        f"{executor_id} (incarnation {incarnation}), which gets no more work. Give each executor a "
        "NIGHTSHIFT_EXECUTOR_NAME of its own, and start it again."
    )


_INCARNATION: Final = sa.select(executors.c.incarnation).where(
    executors.c.id == sa.bindparam("executor_id")
)


def hand_back(
    connection: sa.Connection,
    executor_id: str,
    tokens: Sequence[str],
    *,
    now_ms: int,
    trouble: str = "",
) -> None:
    """Close attempts that an executor gives up; nobody is suspected for it.

    With `trouble` the same would happen again: each next dispatch of the chunk waits longer, up to
    a minute, and the batch says why.
    """
    for row in attempts_repo.open_by_token(connection, executor_id, tokens):
        attempts_repo.close(connection, [row.token], Outcome.HANDED_BACK, now_ms)
        until_ms = GIVEN_UP
        if trouble:
            until_ms = now_ms + min(fault_wait_ms(row.dispatch), FAR_MS)
            _tell(connection, row, trouble[:_TROUBLE_LENGTH])
        chunks_repo.give_up(connection, row.chunk_id, row.dispatch, until_ms)


def _tell(connection: sa.Connection, attempt: sa.Row[Any], trouble: str) -> None:
    _log.error(
        "chunk_cannot_be_run",
        batch=attempt.batch_id,
        chunk=attempt.chunk_id,
        executor=attempt.executor_id,
        error=trouble,
    )
    connection.execute(
        batches.update()
        .where(
            batches.c.id == attempt.batch_id,
            batches.c.status == BatchStatus.IN_PROGRESS.value,
            batches.c.sealed_ms.is_(None),
        )
        .values(
            fault=f"some of its requests cannot be run right now: {trouble}. They are tried again, "
            "at least each minute, until its expires_at; the operator finds more in the log"
        )
    )


def report_death(
    connection: sa.Connection,
    executor_id: str,
    started: Mapping[str, Sequence[Range]],
    *,
    complete: bool,
    start_ms: int,
    new_id: IdGenerator,
    now_ms: int,
) -> None:
    """Close the attempts that were in a dead engine and put the lines that were in it apart.

    Args:
        connection: in a transaction.
        executor_id: whose engine died.
        started: the lines that had entered it, by token.
        complete: nothing else was in it, so that a single line is known to have died alone.
        start_ms: how long that engine took to start, as its next one will.
        new_id: names new chunks.
        now_ms: the store's time.
    """
    rows = attempts_repo.open_by_token(connection, executor_id, list(started))
    single = complete and sum(count_lines(lines) for lines in started.values()) == 1
    _log.warning("engine_died", executor=executor_id, attempts=len(rows))
    quarantine.take_apart(
        connection,
        [
            quarantine.loss_of(
                row,
                started[row.token],
                single=single,
                taken_ms=max(0, now_ms - row.opened_ms) + start_ms,
            )
            for row in rows
        ],
        Outcome.DIED,
        new_id=new_id,
        now_ms=now_ms,
    )
