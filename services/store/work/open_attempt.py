"""Opening and keeping attempts: who may run which lines (design, rule 2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import sqlalchemy as sa

from protos.nightshift.v1 import work_pb2
from services.kit.wire.ids import IdGenerator
from services.store.batches.engines_repo import EngineNotes, Key
from services.store.db.leases import Leases
from services.store.domain.results import Range
from services.store.domain.state import BatchStatus
from services.store.tables.core import batches, chunks
from services.store.work import (
    attempts_repo,
    chunks_repo,
    deaths_repo,
    executors_repo,
    quarantine,
    results_repo,
)
from services.store.work.attempts_repo import Outcome, Ticket

Row = sa.Row[*tuple[Any, ...]]

SILENT_MS: Final = 5_000
"""An attempt that beat within this time was alive when its message came again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One delivery of a dispatch, as its executor tells of it."""

    chunk_id: str
    dispatch: int
    num_delivered: int
    executor_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The attempt runs these lines."""

    ticket: Ticket
    number: int
    lines: Sequence[Range]
    batch: Row
    chunk: Row
    engine: Key | None = None
    """What `EngineNotes` is to keep once this is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Nothing to run."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Another attempt of the dispatch lives, or its batch is put off, for so many milliseconds."""

    left_ms: int


Opening = Opened | Gone | Busy


def open_attempt(
    connection: sa.Connection,
    delivery: Delivery,
    *,
    engines: EngineNotes,
    leases: Leases,
    new_id: IdGenerator,
    now_ms: int,
) -> Opening:
    """Open an attempt for a delivery; a repeated call finds the one it opened before.

    A message that comes again takes over from the attempt that it made before: what was in the
    engine of one that fell silent is put apart. But where it may have come again because the store
    was away, the attempt goes on for as long as it beats; and so it does where the broker forgot
    that it had delivered the message, and delivers it as if it had not.

    Raises:
        ConflictError: a later process has taken the executor's name.
    """
    executors_repo.require_latest(connection, delivery.executor_id, delivery.incarnation)
    batch = connection.execute(_BATCH_OF_CHUNK, {"chunk_id": delivery.chunk_id}).first()
    if batch is None:
        return Gone(reason="ended")
    chunk = _chunk(connection, delivery.chunk_id)
    gone = _gone(batch, chunk, delivery, now_ms)
    if gone is not None:
        return gone
    if batch.retry_ms > now_ms:
        # Its input could not be read; see `losses`.
        return Busy(left_ms=batch.retry_ms - now_ms)
    if held_ms := deaths_repo.held_ms(connection, chunk, now_ms):
        return Busy(left_ms=held_ms)
    opened_before = attempts_repo.open_of_chunk(connection, chunk.id)
    standing = _standing(
        connection, batch, chunk, opened_before, delivery, leases=leases, now_ms=now_ms
    )
    if standing is not None:
        return standing
    if opened_before:
        _take_over(connection, opened_before, leases=leases, new_id=new_id, now_ms=now_ms)
        chunk = _chunk(connection, chunk.id)
        if chunk.state != chunks_repo.OUT:
            return Gone(reason="superseded")
    opening = _open(
        connection, batch, chunk, delivery, lease_ms=leases.lease_ms, new_id=new_id, now_ms=now_ms
    )
    if not isinstance(opening, Opened):
        return opening
    engine = engines.note(
        connection,
        chunk,
        executor_id=delivery.executor_id,
        incarnation=delivery.incarnation,
        now_ms=now_ms,
    )
    return replace(opening, engine=engine)


_BATCH_OF_CHUNK: Final = (
    sa.select(
        batches.c.status,
        batches.c.stopping_ms,
        batches.c.expires_ms,
        batches.c.retry_ms,
        batches.c.endpoint,
        batches.c.model,
    )
    .where(
        batches.c.id
        == sa.select(chunks.c.batch_id)
        .where(chunks.c.id == sa.bindparam("chunk_id"))
        .scalar_subquery()
    )
    .with_for_update()
)
_CHUNK: Final = sa.select(chunks).where(chunks.c.id == sa.bindparam("chunk_id")).with_for_update()


def _chunk(connection: sa.Connection, chunk_id: str) -> Row:
    return connection.execute(_CHUNK, {"chunk_id": chunk_id}).one()


def _gone(batch: Row, chunk: Row, delivery: Delivery, now_ms: int) -> Gone | None:
    if (
        batch.status != BatchStatus.IN_PROGRESS
        or batch.stopping_ms is not None
        or batch.expires_ms <= now_ms
    ):
        return Gone(reason="ended")
    if chunk.state == chunks_repo.DONE:
        return Gone(reason="done")
    if chunk.state != chunks_repo.OUT or chunk.dispatch != delivery.dispatch:
        return Gone(reason="superseded")
    return None


def _standing(
    connection: sa.Connection,
    batch: Row,
    chunk: Row,
    others: Sequence[Row],
    delivery: Delivery,
    *,
    leases: Leases,
    now_ms: int,
) -> Opened | Busy | None:
    """Return what a delivery is told where one of the open attempts goes on."""
    for other in others:
        if leases.end_ms(other.lease_until_ms) > now_ms and _same_delivery(other, delivery):
            return _opened(connection, batch, chunk, other)
        left_ms = _left(other, delivery, leases, now_ms)
        if left_ms > 0:
            if _is_repeated(other, delivery):
                # Told to wait, it comes again for that only.
                attempts_repo.expect(connection, other.token, delivery.num_delivered + 1)
            return Busy(left_ms=left_ms)
    return None


def _same_delivery(attempt: Row, delivery: Delivery) -> bool:
    return bool(
        attempt.dispatch == delivery.dispatch
        and attempt.executor_id == delivery.executor_id
        and attempt.incarnation == delivery.incarnation
        and _is_repeated(attempt, delivery)
    )


def _is_repeated(attempt: Row, delivery: Delivery) -> bool:
    """Whether a delivery tells nothing of an attempt's holder: one after its own would.

    Numbers begin anew where a consumer is made again, or a broker was killed before it had noted
    whom it gave the message to.
    """
    return bool(delivery.num_delivered <= max(1, attempt.num_delivered))


def _left(other: Row, delivery: Delivery, leases: Leases, now_ms: int) -> int:
    """How much longer an open attempt keeps off this delivery; not positive if it does not."""
    if _is_repeated(other, delivery):
        return leases.end_ms(other.lease_until_ms) - now_ms
    if other.opened_ms < leases.heard_since_ms:
        return leases.last_sign_ms(other.lease_until_ms) + SILENT_MS - now_ms
    return 0


def _take_over(
    connection: sa.Connection,
    others: Sequence[Row],
    *,
    leases: Leases,
    new_id: IdGenerator,
    now_ms: int,
) -> None:
    def is_silent(attempt: Row) -> bool:
        return leases.last_sign_ms(attempt.lease_until_ms) <= now_ms - SILENT_MS

    # Whoever holds one that fell silent is lost with all that it has: what was in its engine goes
    # apart together, and is soon done, and not chunk by chunk as the messages come again.
    lives = {(each.executor_id, each.incarnation) for each in others if is_silent(each)}
    lost = [
        each
        for life in sorted(lives)
        for each in attempts_repo.open_of_life(connection, *life)
        if is_silent(each)
    ]
    quarantine.take_apart(
        connection,
        [quarantine.loss_of(each) for each in lost],
        Outcome.LOST,
        new_id=new_id,
        now_ms=now_ms,
    )
    # Those that are alive learn it from their next beat; what they finish still counts.
    attempts_repo.close(connection, [each.token for each in others], Outcome.SUPERSEDED, now_ms)


def _open(
    connection: sa.Connection,
    batch: Row,
    chunk: Row,
    delivery: Delivery,
    *,
    lease_ms: int,
    new_id: IdGenerator,
    now_ms: int,
) -> Opening:
    ticket = Ticket(
        token=f"attempt_{new_id()}",
        batch_id=chunk.batch_id,
        chunk_id=chunk.id,
        project_id=chunk.project_id,
        dispatch=chunk.dispatch,
    )
    lines = results_repo.remaining(
        connection, chunk.batch_id, chunks_repo.unpack_ranges(chunk.lines)
    )
    if not lines:
        chunks_repo.finish(connection, chunk.id)
        return Gone(reason="done")
    number = chunk.attempts + 1
    attempts_repo.insert(
        connection,
        ticket,
        number=number,
        executor_id=delivery.executor_id,
        incarnation=delivery.incarnation,
        num_delivered=delivery.num_delivered,
        now_ms=now_ms,
        lease_ms=lease_ms,
    )
    return Opened(ticket=ticket, number=number, lines=lines, batch=batch, chunk=chunk)


def _opened(connection: sa.Connection, batch: Row, chunk: Row, attempt: Row) -> Opened:
    return Opened(
        ticket=Ticket.of(attempt),
        number=attempt.number,
        lines=results_repo.remaining(
            connection, chunk.batch_id, chunks_repo.unpack_ranges(chunk.lines)
        ),
        batch=batch,
        chunk=chunk,
    )


Drops = dict[str, "work_pb2.DropReason.ValueType"]


def beat(
    connection: sa.Connection, started: Mapping[str, bytes], *, lease_ms: int, now_ms: int
) -> Drops:
    """Move the leases of these attempts and note what is in their engines.

    Args:
        connection: in a transaction.
        started: packed ranges of the lines in the engine, by token.
        lease_ms: how long an attempt lives without a beat.
        now_ms: the store's time.

    Returns:
        The attempts to drop at once, and why.
    """
    rows = {row.token: row for row in attempts_repo.standing(connection, list(started))}
    drops: Drops = {}
    alive: list[Ticket] = []
    marks: dict[str, bytes] = {}
    returned = [row for row in rows.values() if row.outcome == Outcome.LOST.value]
    for token, packed in started.items():
        row = rows.get(token)
        reason = drop_reason(row)
        if reason is not None or row is None:
            drops[token] = reason or work_pb2.DROP_REASON_DONE
            continue
        alive.append(Ticket.of(row))
        if row.started != packed:
            marks[token] = packed
    attempts_repo.extend(connection, alive, now_ms + lease_ms)
    attempts_repo.mark_started(connection, marks)
    quarantine.take_back(connection, returned)
    return drops


_SEALED: Final = {
    BatchStatus.CANCELLED.value: work_pb2.DROP_REASON_CANCELLED,
    BatchStatus.EXPIRED.value: work_pb2.DROP_REASON_EXPIRED,
    BatchStatus.COMPLETED.value: work_pb2.DROP_REASON_DONE,
}


def drop_reason(row: Row | None) -> "work_pb2.DropReason.ValueType | None":
    """Return why an attempt (`attempts_repo.standing`) must stop; None when it goes on.

    An attempt that is unknown belongs to a batch that has ended and was cleared.
    """
    if row is None:
        return work_pb2.DROP_REASON_DONE
    if row.sealed_ms is not None:
        return _SEALED[row.seal_outcome]
    if row.stopping_ms is not None:
        if row.status == BatchStatus.CANCELLING:
            return work_pb2.DROP_REASON_CANCELLED
        return work_pb2.DROP_REASON_EXPIRED
    if row.state == chunks_repo.DONE:
        return work_pb2.DROP_REASON_DONE
    if row.closed_ms is not None or row.current != row.dispatch:
        return work_pb2.DROP_REASON_SUPERSEDED
    return None
