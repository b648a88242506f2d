"""Statements on attempts: one delivery of a chunk to an executor each."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import sqlalchemy as sa

from services.store.db.leases import Leases
from services.store.tables.core import attempts, batches, chunks
from services.store.work import chunks_repo

Row = sa.Row[*tuple[Any, ...]]


class Outcome(StrEnum):
    """How an attempt ended; the store's own word, for people."""

    DONE = "done"
    HANDED_BACK = "handed_back"
    SUPERSEDED = "superseded"
    LOST = "lost"
    DIED = "died"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a token stands for; none of it ever changes. The store's own frames have no token."""

    token: str
    batch_id: str
    chunk_id: str
    project_id: str
    dispatch: int

    @classmethod
    def of(cls, row: Row) -> "Ticket":
        """Return the ticket of an attempt's row."""
        return cls(
            token=row.token,
            batch_id=row.batch_id,
            chunk_id=row.chunk_id,
            project_id=row.project_id,
            dispatch=row.dispatch,
        )


_TICKET: Final = sa.select(
    attempts.c.token,
    attempts.c.batch_id,
    attempts.c.chunk_id,
    attempts.c.project_id,
    attempts.c.dispatch,
).where(attempts.c.token == sa.bindparam("token"))


def ticket(connection: sa.Connection, token: str) -> Ticket | None:
    """Return what a token stands for; None when its batch has ended and was cleared."""
    row = connection.execute(_TICKET, {"token": token}).first()
    return None if row is None else Ticket(**row._asdict())


def insert(
    connection: sa.Connection,
    made: Ticket,
    *,
    number: int,
    executor_id: str,
    incarnation: str,
    num_delivered: int,
    now_ms: int,
    lease_ms: int,
) -> None:
    """Insert an attempt with a live lease, its chunk's lease moved along."""
    connection.execute(
        _INSERT,
        {
            "token": made.token,
            "chunk_id": made.chunk_id,
            "batch_id": made.batch_id,
            "project_id": made.project_id,
            "dispatch": made.dispatch,
            "number": number,
            "executor_id": executor_id,
            "incarnation": incarnation,
            "num_delivered": num_delivered,
            "opened_ms": now_ms,
            "lease_until_ms": now_ms + lease_ms,
            "started": b"",
        },
    )
    connection.execute(
        _OPENED, {"of_chunk": made.chunk_id, "number": number, "until": now_ms + lease_ms}
    )


_INSERT: Final = attempts.insert()
_OPENED: Final = (
    chunks.update()
    .where(chunks.c.id == sa.bindparam("of_chunk"))
    .values(attempts=sa.bindparam("number"), lease_until_ms=sa.bindparam("until"))
)
_OPEN_OF_CHUNK: Final = (
    sa.select(attempts)
    .where(
        attempts.c.chunk_id == sa.bindparam("chunk_id"),
        attempts.c.closed_ms.is_(None),
    )
    .order_by(attempts.c.number)
)


def expect(connection: sa.Connection, token: str, num_delivered: int) -> None:
    """Note up to which delivery its message may come again though its holder lives."""
    connection.execute(
        attempts.update().where(attempts.c.token == token).values(num_delivered=num_delivered)
    )


def open_of_chunk(connection: sa.Connection, chunk_id: str) -> list[Row]:
    """Return the open attempts of a chunk, by number."""
    return list(connection.execute(_OPEN_OF_CHUNK, {"chunk_id": chunk_id}))


def open_of_chunks(connection: sa.Connection, chunk_ids: Sequence[str]) -> list[Row]:
    """Return the open attempts of these chunks, by number."""
    return list(
        connection.execute(
            sa.select(attempts)
            .where(attempts.c.chunk_id.in_(chunk_ids), attempts.c.closed_ms.is_(None))
            .order_by(attempts.c.number)
        )
    )


def open_of_others(
    connection: sa.Connection, executor_id: str, *, not_incarnation: str
) -> list[Row]:
    """Return the open attempts of earlier processes of an executor."""
    return list(
        connection.execute(
            sa.select(attempts)
            .where(
                attempts.c.executor_id == executor_id,
                attempts.c.closed_ms.is_(None),
                attempts.c.incarnation != not_incarnation,
            )
            .order_by(attempts.c.token)
        )
    )


def open_of_life(connection: sa.Connection, executor_id: str, incarnation: str) -> list[Row]:
    """Return the open attempts of one process of an executor."""
    return list(
        connection.execute(
            sa.select(attempts)
            .where(
                attempts.c.executor_id == executor_id,
                attempts.c.closed_ms.is_(None),
                attempts.c.incarnation == incarnation,
            )
            .order_by(attempts.c.token)
        )
    )


def open_by_token(connection: sa.Connection, executor_id: str, tokens: Sequence[str]) -> list[Row]:
    """Return those of an executor's attempts that are open, by token."""
    return list(
        connection.execute(
            sa.select(attempts)
            .where(
                attempts.c.token.in_(tokens),
                attempts.c.executor_id == executor_id,
                attempts.c.closed_ms.is_(None),
            )
            .order_by(attempts.c.token)
        )
    )


def any_open(connection: sa.Connection, batch_id: str, now_ms: int, leases: Leases) -> bool:
    """Tell whether an attempt of a batch is open under a lease that has not lapsed."""
    found = connection.scalar(
        sa.select(attempts.c.token)
        .where(
            attempts.c.batch_id == batch_id,
            attempts.c.closed_ms.is_(None),
            ~leases.lapsed(attempts.c.lease_until_ms, now_ms),
        )
        .limit(1)
    )
    return found is not None


def close(connection: sa.Connection, tokens: Sequence[str], outcome: Outcome, now_ms: int) -> None:
    """Close these attempts where they are open."""
    if tokens:
        connection.execute(
            attempts.update()
            .where(attempts.c.token.in_(tokens), attempts.c.closed_ms.is_(None))
            .values(closed_ms=now_ms, outcome=outcome.value)
        )


def was_not_lost(connection: sa.Connection, token: str) -> bool:
    """Call an attempt superseded that was taken for lost; tell whether it was."""
    changed = connection.execute(
        attempts.update()
        .where(attempts.c.token == token, attempts.c.outcome == Outcome.LOST.value)
        .values(outcome=Outcome.SUPERSEDED.value)
    )
    return changed.rowcount == 1


_CLOSE_OF_CHUNK: Final = (
    attempts.update()
    .where(
        attempts.c.chunk_id == sa.bindparam("of_chunk"),
        attempts.c.closed_ms.is_(None),
    )
    .values(closed_ms=sa.bindparam("at_ms"), outcome=sa.bindparam("how"))
)


def close_of_chunk(connection: sa.Connection, chunk_id: str, outcome: Outcome, now_ms: int) -> None:
    """Close all open attempts of a chunk."""
    connection.execute(
        _CLOSE_OF_CHUNK, {"of_chunk": chunk_id, "at_ms": now_ms, "how": outcome.value}
    )


_EXTEND_ATTEMPT: Final = (
    attempts.update()
    .where(attempts.c.token == sa.bindparam("of_token"), attempts.c.closed_ms.is_(None))
    .values(lease_until_ms=sa.bindparam("until"))
)
_EXTEND_CHUNK: Final = (
    chunks.update()
    .where(
        chunks.c.id == sa.bindparam("of_chunk"),
        chunks.c.dispatch == sa.bindparam("of_dispatch"),
        chunks.c.state == chunks_repo.OUT,
    )
    .values(lease_until_ms=sa.bindparam("until"))
)


def extend(connection: sa.Connection, tickets: Sequence[Ticket], until_ms: int) -> None:
    """Move the leases of open attempts and of their chunks to `until_ms`."""
    if not tickets:
        return
    connection.execute(
        _EXTEND_ATTEMPT, [{"of_token": each.token, "until": until_ms} for each in tickets]
    )
    connection.execute(
        _EXTEND_CHUNK,
        [
            {"of_chunk": each.chunk_id, "of_dispatch": each.dispatch, "until": until_ms}
            for each in tickets
        ],
    )


_MARK_STARTED: Final = (
    attempts.update()
    .where(attempts.c.token == sa.bindparam("of_token"))
    .values(started=sa.bindparam("new_started"))
)


def mark_started(connection: sa.Connection, marks: dict[str, bytes]) -> None:
    """Note which lines are in the engine, by token, as packed ranges."""
    if marks:
        connection.execute(
            _MARK_STARTED,
            [{"of_token": token, "new_started": packed} for token, packed in marks.items()],
        )


_STANDING: Final = (
    sa.select(
        attempts.c.token,
        attempts.c.batch_id,
        attempts.c.chunk_id,
        attempts.c.project_id,
        attempts.c.dispatch,
        attempts.c.started,
        attempts.c.closed_ms,
        attempts.c.outcome,
        chunks.c.dispatch.label("current"),
        chunks.c.state,
        batches.c.status,
        batches.c.sealed_ms,
        batches.c.seal_outcome,
        batches.c.stopping_ms,
    )
    .join(chunks, chunks.c.id == attempts.c.chunk_id)
    .join(batches, batches.c.id == attempts.c.batch_id)
    .where(attempts.c.token.in_(sa.bindparam("tokens", expanding=True)))
    .order_by(attempts.c.token)
)


def standing(connection: sa.Connection, tokens: Sequence[str]) -> list[Row]:
    """Return these attempts with what decides whether they go on."""
    return list(connection.execute(_STANDING, {"tokens": list(tokens)}))
