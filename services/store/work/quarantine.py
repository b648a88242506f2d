"""Quarantine: after an engine's death the lines that were in it run apart, until one is to blame.

Suspects are halved into chunks of their own that run alone in an engine. One that dies is halved
again; a single line that dies alone `max_attempts` times is given up, so that a poison line among n
suspects is found within ceil(log2 n) + `max_attempts` deaths, the first one included, and its
neighbours succeed.

Where an executor is lost without a word, mostly no line is to blame: its suspects run apart first
all together, so that they are soon done. It may also have been killed with its engine before a beat
told what was in it, or with nothing in it. So a chunk that is lost like that is suspected as a
whole, but only after some such losses. And an executor that comes back with the attempt it had was
not dead: what was counted is taken back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

import sqlalchemy as sa

from protos.nightshift.v1 import dispatch_pb2
from services.kit.process.log import get_logger
from services.kit.wire.ids import IdGenerator, ProjectId
from services.store.bus import outbox
from services.store.db.clock import GIVEN_UP
from services.store.domain.results import (
    Range,
    count_lines,
    intersect,
    normalise,
    subtract,
)
from services.store.tables.core import batches, chunks
from services.store.work import attempts_repo, chunks_repo, deaths_repo, results_repo

_log = get_logger(__name__)

Row = sa.Row[*tuple[Any, ...]]

GIVEN_UP_DEATHS: Final = 1_000_000
"""`deaths_alone` of a line that is given up though it may have died fewer times alone."""
UNTRIED_DEATHS: Final = 2_000_000
"""The same of one that never ran alone."""
UNSEEN_DEATHS: Final = 3
"""So many losses of a chunk, none of whose lines was seen in an engine, are one death of all."""
UNSEEN_ALONE: Final = 10
"""The same of a chunk that runs alone: its executor says at once what of it is in the engine, so
that mostly nothing was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """An open attempt whose engine died, or that was lost without a word.

    Attributes:
        started: the lines that were in the engine, as far as is known.
        seen: whether that is the executor's own word on the death, and not its last beat's.
        single: whether nothing but one line of it was in the engine.
        taken_ms: what the death took of an executor's time, where it was reported.
    """

    token: str
    chunk_id: str
    batch_id: str
    dispatch: int
    number: int
    started: tuple[Range, ...]
    seen: bool = False
    single: bool = False
    taken_ms: int = 0


def loss_of(
    attempt: Row,
    started: Sequence[Range] | None = None,
    *,
    single: bool = False,
    taken_ms: int = 0,
) -> Loss:
    """Return the loss of an attempt; without better knowledge the last beat's marks count."""
    seen = started is not None
    if started is None:
        started = chunks_repo.unpack_ranges(attempt.started)
    return Loss(
        token=attempt.token,
        chunk_id=attempt.chunk_id,
        batch_id=attempt.batch_id,
        dispatch=attempt.dispatch,
        number=attempt.number,
        started=tuple(normalise(started)),
        seen=seen,
        single=single,
        taken_ms=taken_ms,
    )


def halves(ranges: Sequence[Range]) -> tuple[list[Range], list[Range]]:
    """Cut lines in two, the first part the larger one where their number is odd."""
    left: list[Range] = []
    wanted = (count_lines(ranges) + 1) // 2
    for first, count in ranges:
        taken = min(count, wanted)
        if taken:
            left.append((first, taken))
            wanted -= taken
    return left, subtract(ranges, left)


def take_apart(
    connection: sa.Connection,
    losses: Sequence[Loss],
    outcome: attempts_repo.Outcome,
    *,
    new_id: IdGenerator,
    now_ms: int,
) -> None:
    """Close lost attempts and put the lines that were in their engine apart.

    What else is left of their chunks waits for its next dispatch. Wake the loops `outbox` and
    `ender` once this is committed.
    """
    ordered = sorted(losses, key=lambda loss: (loss.batch_id, loss.chunk_id))
    for batch_id, of_batch in groupby(ordered, key=lambda loss: loss.batch_id):
        batch = connection.execute(
            sa.select(batches).where(batches.c.id == batch_id).with_for_update()
        ).one()
        here = list(of_batch)
        attempts_repo.close(connection, [loss.token for loss in here], outcome, now_ms)
        if batch.sealed_ms is None and batch.stopping_ms is None:
            spent = _charge(connection, batch, here, now_ms)
            _Batch(connection, batch, new_id, now_ms, spent).take_apart(here)
            free(connection, batch, now_ms)


def _charge(connection: sa.Connection, batch: Row, losses: Sequence[Loss], now_ms: int) -> bool:
    """Charge a reported death to a batch that is surely to blame.

    That is one whose lines were alone in the engine, or had ended another one before. An executor
    that was lost without a word says nothing about its lines.

    Returns:
        Whether the suspects are given up without being searched.
    """
    for loss in losses:
        if not (loss.seen and loss.started):
            continue
        chunk = connection.execute(sa.select(chunks).where(chunks.c.id == loss.chunk_id)).one()
        if chunk.alone or loss.single or batch.engine_deaths:
            return deaths_repo.charge(
                connection, batch, chunk.pool_id, taken_ms=loss.taken_ms, now_ms=now_ms
            )
    return False


def take_back(connection: sa.Connection, returned: Sequence[Row]) -> None:
    """Count no death for these attempts (`attempts_repo.standing`): whose they were is alive.

    They were taken for lost while their executor was frozen or cut off.
    """
    for attempt in returned:
        if not attempts_repo.was_not_lost(connection, attempt.token):
            continue
        chunk = connection.execute(
            sa.select(chunks).where(chunks.c.id == attempt.chunk_id).with_for_update()
        ).one()
        if chunk.state != chunks_repo.DONE and (chunk.alone or not attempt.started):
            _log.info("loss_taken_back", batch=chunk.batch_id, chunk=chunk.id)
            connection.execute(
                chunks.update()
                .where(chunks.c.id == chunk.id)
                .values(
                    deaths=max(0, chunk.deaths - 1),
                    deaths_alone=max(0, chunk.deaths_alone - bool(attempt.started)),
                )
            )


def free(connection: sa.Connection, batch: Row, now_ms: int) -> None:
    """Tell the scheduler that chunks of a batch wait to be handed out."""
    event = dispatch_pb2.Event(
        kind=dispatch_pb2.EVENT_KIND_CHUNKS_FREED, batch_id=batch.id, pool_id=batch.pool_id
    )
    outbox.emit(connection, event, ProjectId(batch.project_id), now_ms)


@dataclass(slots=True)
class _Suspects:
    """Lines that are to run apart together."""

    lines: list[Range] = field(default_factory=list)
    number: int = 0
    size: int = 0
    deaths: int = 0
    seen: bool = False
    single: bool = False


@dataclass(frozen=True, slots=True)
class _Batch:
    """The losses of one batch, whose row is locked."""

    connection: sa.Connection
    batch: Row
    new_id: IdGenerator
    now_ms: int
    spent: bool
    """Whether its suspects are given up."""

    def take_apart(self, losses: Sequence[Loss]) -> None:
        suspects: dict[tuple[str, str | None], _Suspects] = {}
        for loss in losses:
            chunk = self.connection.execute(
                sa.select(chunks).where(chunks.c.id == loss.chunk_id).with_for_update()
            ).one()
            if chunk.state != chunks_repo.OUT or chunk.dispatch != loss.dispatch:
                # Its lines run elsewhere under a later dispatch; a death there will tell.
                continue
            left = results_repo.remaining(
                self.connection, self.batch.id, chunks_repo.unpack_ranges(chunk.lines)
            )
            started = intersect(loss.started, left)
            if chunk.alone:
                self._died_alone(chunk, loss, left, started)
                continue
            unseen = not started and not loss.seen
            if unseen and chunk.deaths + 1 >= UNSEEN_DEATHS:
                started = left
            if started:
                # A chunk is of one pool and one model.
                apart = suspects.setdefault((chunk.pool_id, chunk.model), _Suspects())
                apart.lines.extend(started)
                apart.number = max(apart.number, loss.number)
                apart.size += _share(chunk, count_lines(started))
                apart.deaths = max(apart.deaths, chunk.deaths + 1)
                apart.single = loss.single
                apart.seen = loss.seen
            self._keep(chunk, subtract(left, started), deaths=int(unseen))
        for (pool_id, model), apart in suspects.items():
            lines = normalise(apart.lines)
            if self.spent:
                self._give_up(lines, apart.size, pool_id=pool_id, model=model)
                continue
            for part in halves(lines) if apart.seen else (lines,):
                self._add_alone(
                    part,
                    apart.size * count_lines(part) // max(1, count_lines(lines)),
                    pool_id=pool_id,
                    model=model,
                    attempts=apart.number,
                    deaths=apart.deaths,
                    deaths_alone=int(apart.single),
                )

    def _keep(self, chunk: Row, lines: list[Range], *, deaths: int = 0) -> None:
        """Leave these lines in a chunk and end its lease; nothing left ends the chunk."""
        if not lines:
            chunks_repo.finish(self.connection, chunk.id)
            return
        self.connection.execute(
            chunks.update()
            .where(chunks.c.id == chunk.id)
            .values(
                lines=chunks_repo.pack_ranges(lines),
                first_line=lines[0][0],
                line_count=count_lines(lines),
                input_bytes=_share(chunk, count_lines(lines)),
                lease_until_ms=GIVEN_UP,
                deaths=chunks.c.deaths + deaths,
            )
        )

    def _died_alone(self, chunk: Row, loss: Loss, left: list[Range], started: list[Range]) -> None:
        if not left:
            # Who was taken for lost before had not lost them.
            chunks_repo.finish(self.connection, chunk.id)
            return
        unseen = not started and not loss.seen
        if unseen and (chunk.deaths + 1) % UNSEEN_ALONE:
            # It counts when it has come to that again and again: there must be an end to it.
            self._again_alone(chunk, left, deaths_alone=0)
            return
        if count_lines(left) == 1:
            deaths = chunk.deaths_alone + 1
            _log.warning("line_died_alone", batch=self.batch.id, line=left[0][0], deaths=deaths)
            self._again_alone(chunk, left, deaths_alone=GIVEN_UP_DEATHS if self.spent else 1)
            return
        chunks_repo.finish(self.connection, chunk.id)
        suspects = started or left
        if self.spent:
            self._give_up(suspects, chunk.input_bytes, pool_id=chunk.pool_id, model=chunk.model)
            suspects_left: tuple[list[Range], ...] = ()
        else:
            suspects_left = halves(suspects)
        for lines in (*suspects_left, subtract(left, suspects)):
            self._add_alone(
                lines,
                _share(chunk, count_lines(lines)),
                pool_id=chunk.pool_id,
                model=chunk.model,
                attempts=chunk.attempts,
                deaths=chunk.deaths + 1,
                deaths_alone=int(loss.single and lines == suspects),
            )

    def _again_alone(self, chunk: Row, left: list[Range], *, deaths_alone: int) -> None:
        self._keep(chunk, left, deaths=1)
        self.connection.execute(
            chunks.update()
            .where(chunks.c.id == chunk.id)
            .values(
                state=chunks_repo.QUEUED,
                lease_until_ms=None,
                deaths_alone=chunks.c.deaths_alone + deaths_alone,
            )
        )

    def _give_up(
        self, lines: list[Range], input_bytes: int, *, pool_id: str, model: str | None
    ) -> None:
        """Leave each of these lines to the ender, untried."""
        _log.warning("suspects_given_up", batch=self.batch.id, lines=count_lines(lines))
        for first, count in lines:
            for line in range(first, first + count):
                self._add_alone(
                    [(line, 1)],
                    input_bytes // max(1, count_lines(lines)),
                    pool_id=pool_id,
                    model=model,
                    attempts=0,
                    deaths=1,
                    deaths_alone=UNTRIED_DEATHS,
                )

    def _add_alone(
        self,
        lines: list[Range],
        input_bytes: int,
        *,
        pool_id: str,
        model: str | None,
        attempts: int,
        deaths: int,
        deaths_alone: int,
    ) -> None:
        """Queue a chunk that runs alone; its attempts go on counting from its lines' last one.

        No lines, no chunk.
        """
        if not lines:
            return
        _log.warning("lines_apart", batch=self.batch.id, lines=count_lines(lines))
        chunks_repo.insert(
            self.connection,
            [
                chunks_repo.new_chunk(
                    chunk_id=f"chunk_{self.new_id()}",
                    batch=self.batch,
                    pool_id=pool_id,
                    model=model,
                    lines=lines,
                    input_bytes=input_bytes,
                    state=chunks_repo.QUEUED,
                    alone=True,
                    dispatched_ms=None,
                    attempts=attempts,
                    deaths=deaths,
                    deaths_alone=deaths_alone,
                )
            ],
        )


def _share(chunk: Row, lines: int) -> int:
    """Input bytes of some of a chunk's lines, taken as equally long."""
    return int(chunk.input_bytes * lines // max(1, chunk.line_count))
