"""Writes the end files of sealed batches and ends them; then drops what only running needed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa

from protos.nightshift.v1 import dispatch_pb2
from services.kit.process import telemetry
from services.kit.process.log import get_logger
from services.kit.wire.errors import NightshiftError, UnavailableError
from services.kit.wire.ids import FileId, ProjectId
from services.store.batches import batches_repo
from services.store.blobs import blobs_repo
from services.store.blobs.base import BlobDamagedError, BlobMissingError, BlobUnreadableError
from services.store.bus import outbox
from services.store.cleaning import ended_batches
from services.store.context import Context
from services.store.domain.retry_budget import SUSPECT_TRIES, fault_wait_ms
from services.store.domain.state import BatchStatus
from services.store.ending import finalize_leases, salvage
from services.store.ending.end_files import EndFile, Kind
from services.store.ending.salvage import Losses
from services.store.files import files_repo, intake
from services.store.inputs.input_reader import InputReader
from services.store.tables.core import batches

_log = get_logger(__name__)

Row = sa.Row[*tuple[Any, ...]]

AT_ONCE: Final = 4
PART_BYTES: Final = 16 * 1024 * 1024
"""A part of an end file ends once it has so many bytes; at least 8 MiB, but for the last."""
DEFAULT_EXPIRY_SECONDS: Final = 2_592_000
_LEASE_MS: Final = 60_000
_LOOK_SECONDS: Final = 0.05


_SEALED: Final = (
    sa.select(batches.c.status, batches.c.seal_outcome, batches.c.finalize_holder)
    .where(batches.c.id == sa.bindparam("of_batch"))
    .with_for_update()
)


class LeaseLostError(Exception):
    """Another store finalizes the batch now."""


class Finalizer:
    """Works on sealed batches, a few at once, each under a lease."""

    def __init__(self, context: Context, reader: InputReader) -> None:
        """Finalize batches of `context`, reading line indexes through `reader`."""
        self._context = context
        self._reader = reader
        self._holder = context.db.holder
        self._running: dict[str, asyncio.Task[None]] = {}
        # Of batches that wait for another try: failures in a row.
        self._failures: dict[str, int] = {}
        # Whether the one that runs has ended its store before: nothing else begins beside it.
        self._alone = False

    async def run_once(self) -> int:
        """Finalize every sealed batch, clear up after them, and return how many ended."""
        ended = 0
        try:
            while True:
                ended += await self._finalize_all()
                if not await ended_batches.clear_some(self._context):
                    return ended
        finally:
            # Of a turn that failed nothing goes on, and the next one begins with nothing.
            left, self._running = self._running, {}
            for task in left.values():
                task.cancel()
            await asyncio.gather(*left.values(), return_exceptions=True)

    async def _finalize_all(self) -> int:
        ended = 0
        while True:
            if len(self._running) < AT_ONCE:
                for row, part in await self._claim(AT_ONCE - len(self._running)):
                    self._alone = row.tries > SUSPECT_TRIES
                    self._running[row.id] = asyncio.create_task(self._finalize(row, part))
            if not self._running:
                return ended
            # Batches that are sealed meanwhile need not wait for a large one.
            await asyncio.wait(
                self._running.values(),
                timeout=_LOOK_SECONDS if len(self._running) < AT_ONCE else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for batch_id, task in list(self._running.items()):
                if task.done():
                    del self._running[batch_id]
                    task.result()
                    ended += 1

    async def _claim(self, most: int) -> list[tuple[Row, str]]:
        """Take the lease of up to `most` batches, those sealed first, first.

        The first part of each is announced in the same transaction, which most need no other for.
        """
        if self._running and self._alone:
            return []
        asked = finalize_leases.Claim(
            holder=self._holder,
            running=frozenset(self._running),
            others_dead=self._context.db.others_dead,
            now_ms=self._context.now_ms(),
            lease_ms=_LEASE_MS,
        )
        if not await self._context.db.read(
            lambda found: finalize_leases.waiting(found, asked, most)
        ):
            return []

        def take(connection: sa.Connection) -> list[tuple[Row, str]]:
            rows = finalize_leases.claim(connection, asked, most)
            return [(row, self._announce_part(connection, row)) for row in rows]

        return await self._context.db.write("finalize.claim", take)

    async def _finalize(self, batch: Row, part: str) -> None:
        parts = Announced([part])
        try:
            with telemetry.span_of("finalize", batch.traceparent, batch=batch.id):
                await self._finish(batch, parts)
        except LeaseLostError:
            _log.warning("finalize_lease_lost", batch=batch.id)
            intake.give_up(self._context, parts.names)
        except BlobMissingError as error:
            _log.error("stored_data_missing", batch=batch.id, blob=error.name)
            intake.give_up(self._context, parts.names)
            await self._put_off(batch, error)
        except BlobUnreadableError as error:
            _log.error("stored_data_unreadable", batch=batch.id, blob=error.name)
            intake.give_up(self._context, parts.names)
            await self._put_off(batch, error)
        except Exception as error:  # noqa: BLE001 - logged; the batch is tried again
            _log.exception("finalize_failed", batch=batch.id)
            intake.give_up(self._context, parts.names)
            await self._put_off(batch, error)
        else:
            self._failures.pop(batch.id, None)
            _log.info("batch_ended", batch=batch.id)
            self._context.wake("outbox")
            self._context.wake("deliveries")
            self._context.wake("events")

    async def _put_off(self, batch: Row, error: Exception) -> None:
        """Give the batch up until later; where even that fails, its lease runs out.

        What comes back by itself is looked for each 5 s; what people must mend, ever less often.
        """
        by_itself = not isinstance(error, BlobUnreadableError)
        passing = by_itself and isinstance(error, UnavailableError)
        failures = 1 if passing else self._failures.get(batch.id, 0) + 1
        self._failures[batch.id] = failures
        now_ms = self._context.now_ms()
        soon_ms = now_ms + fault_wait_ms(1)
        until_ms = now_ms + fault_wait_ms(failures)
        if isinstance(error, BlobMissingError):
            # Then it ends without.
            until_ms = min(until_ms, max(batch.expires_ms, soon_ms))
        try:
            await self._context.db.write(
                "finalize.retry",
                lambda connection: finalize_leases.put_off(
                    connection,
                    batch.id,
                    self._holder,
                    until_ms=until_ms,
                    soon_ms=soon_ms,
                    fault=_words(error),
                ),
            )
        except NightshiftError as failure:
            _log.warning("finalize_not_put_off", batch=batch.id, error=failure.message)

    async def _finish(self, batch: Row, parts: "Announced") -> None:
        try:
            await self._write_all(batch, parts, None)
        except BlobMissingError as missing:
            if not salvage.ends_anyway(batch, self._context.now_ms()):
                raise
            intake.give_up(self._context, parts.drop())
            losses = await salvage.look(self._context, batch)
            if isinstance(missing, BlobDamagedError) and missing.name in _input_blobs(batch):
                losses = replace(losses, input=True)
            elif not losses.blobs:
                # It is there again.
                raise
            _log.error(
                "batch_ends_without",
                batch=batch.id,
                blobs=sorted(losses.blobs)[:8],
                count=len(losses.blobs),
                results=losses.results,
            )
            await self._write_all(batch, parts, losses)

    async def _write_all(self, batch: Row, parts: "Announced", losses: Losses | None) -> None:
        completed = batch.completed - (losses.completed if losses is not None else 0)
        # The output file holds what completed, the error file all else; there is no empty one.
        kinds: dict[Kind, int] = {"output": completed, "error": batch.lines_total - completed}
        written = [
            await self._write(batch, kind, parts, losses) for kind, lines in kinds.items() if lines
        ]
        await self._context.db.write(
            "finalize.end", lambda connection: self._end(connection, batch, written, losses)
        )

    async def _write(
        self, batch: Row, kind: Kind, announced: "Announced", losses: Losses | None = None
    ) -> files_repo.NewFile:
        """Write one end file as durable parts that nothing names yet."""
        file = EndFile(self._context, self._reader, batch, kind, losses)
        parts: list[tuple[str, int]] = []
        async with aclosing(file.pieces()) as pieces:
            first = await anext(pieces, None)
            while first is not None:
                part = _Part(first, pieces)
                second = await anext(pieces, None)
                content = first if second is None else part.content(second)
                name = announced.take() or await self._announce(batch, announced)
                parts.append((name, await self._context.blobs.put("finalize.write", name, content)))
                first = None if second is None else await anext(pieces, None)
        now_at = self._context.now_ms() // 1000
        expiry = batch.output_expires_seconds or DEFAULT_EXPIRY_SECONDS
        return files_repo.NewFile(
            id=FileId(f"file-{self._context.new_id()}"),
            project_id=ProjectId(batch.project_id),
            purpose="batch_output",
            filename=f"{batch.id}_{kind}.jsonl",
            bytes=sum(size for _, size in parts),
            created_at=now_at,
            expires_at=now_at + expiry,
            parts=parts,
            of_batch_id=batch.id,
            of_kind=kind,
        )

    async def _announce(self, batch: Row, announced: "Announced") -> str:
        """Announce the next part, under a lease that is renewed with it."""

        def announce(connection: sa.Connection) -> str:
            self._renew(connection, batch.id, _LEASE_MS)
            return self._announce_part(connection, batch)

        name = await self._context.db.write("finalize.announce", announce)
        announced.names.append(name)
        return name

    def _announce_part(self, connection: sa.Connection, batch: Row) -> str:
        project_id = ProjectId(batch.project_id)
        name = self._context.blob_name(project_id, "part")
        blobs_repo.announce(connection, [name], project_id, self._context.now_ms())
        return name

    def _renew(self, connection: sa.Connection, batch_id: str, lease_ms: int) -> None:
        renewed = connection.execute(
            batches.update()
            .where(batches.c.id == batch_id, batches.c.finalize_holder == self._holder)
            .values(finalize_until_ms=self._context.now_ms() + lease_ms)
        )
        if renewed.rowcount != 1:
            raise LeaseLostError(batch_id)

    def _end(
        self,
        connection: sa.Connection,
        batch: Row,
        written: list[files_repo.NewFile],
        losses: Losses | None,
    ) -> None:
        """Name the files and enter the end state, whichever it is by now."""
        now_ms = self._context.now_ms()
        row = connection.execute(_SEALED, {"of_batch": batch.id}).one()
        if row.finalize_holder != self._holder:
            raise LeaseLostError(batch.id)
        end = BatchStatus(row.seal_outcome)
        if row.status == BatchStatus.CANCELLING:
            end = BatchStatus.CANCELLED
        for file in written:
            files_repo.insert(connection, file)
        ids = {file.of_kind: file.id for file in written}
        moved = batches_repo.move(
            connection,
            batch.id,
            end,
            now_ms,
            output_file_id=ids.get("output"),
            error_file_id=ids.get("error"),
            finalize_holder=None,
            finalize_until_ms=None,
            fault=None,
            **({} if losses is None else _without(batch, losses)),
        )
        if not moved:
            raise LeaseLostError(batch.id)
        event = dispatch_pb2.Event(
            kind=dispatch_pb2.EVENT_KIND_BATCH_ENDED,
            batch_id=batch.id,
            pool_id=batch.pool_id or "",
        )
        outbox.emit(connection, event, ProjectId(batch.project_id), now_ms)


def _input_blobs(batch: Row) -> set[str]:
    return {name for name, _ in batch.input_parts or ()}


def _words(error: Exception) -> str:
    """Say why end files could not be written, to those who wait for them."""
    if isinstance(error, BlobMissingError):
        return (
            f"stored data of this batch is missing or damaged (blob {error}), so that its files "
            "cannot be written; it is tried again once the operator has restored it, which "
            "`nightshift doctor --check` helps with. Cancelled, or past its time, it ends without"
        )
    if isinstance(error, BlobUnreadableError):
        return (
            f"stored data of this batch cannot be read: {error.why} (blob {error.name}), so that "
            "its files cannot be written; it is tried again, at least every five minutes. Where "
            "that disk never gives it back, the operator moves the blob away, and it counts as lost"
        )
    if isinstance(error, NightshiftError):
        return f"its files cannot be written right now: {error.message}"
    return (
        "its files cannot be written because of a fault of the server, whose log names it; it is "
        "tried again"
    )


def _without(batch: Row, losses: Losses) -> dict[str, object]:
    """The columns of a batch that ends without what is lost: counts are those of its files."""
    return {
        "completed": batch.completed - losses.completed,
        "failed": batch.failed + losses.completed,
        "errors": losses.errors(batch.input_file_id),
    }


class Announced:
    """Names of the parts of a batch's end files; the first is announced with the claim."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self._unused = list(names)

    def drop(self) -> list[str]:
        """Forget all names, and return them."""
        dropped, self.names, self._unused = self.names, [], []
        return dropped

    def take(self) -> str | None:
        return self._unused.pop() if self._unused else None


class _Part:
    """One part of a file: pieces until it is large enough."""

    def __init__(self, first: bytes, pieces: AsyncIterator[bytes]) -> None:
        self._first = first
        self._pieces = pieces

    async def content(self, second: bytes) -> AsyncIterator[bytes]:
        size = len(self._first) + len(second)
        yield self._first
        yield second
        while size < PART_BYTES and (piece := await anext(self._pieces, None)) is not None:
            size += len(piece)
            yield piece
