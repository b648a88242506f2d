"""Judges the input of new batches from the line index made during upload."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import sqlalchemy as sa

from services.kit.process import telemetry
from services.kit.process.log import get_logger
from services.kit.wire.errors import NotFoundError
from services.kit.wire.ids import ProjectId
from services.store.admin import models_repo
from services.store.batches import batches_repo
from services.store.blobs.base import BlobMissingError, BlobUnreadableError
from services.store.context import Context
from services.store.domain import cutter
from services.store.domain.retry_budget import MOST_VALIDATIONS, wait_ms
from services.store.domain.validation import validate
from services.store.files import files_repo
from services.store.inputs.input_reader import InputReader, read_span
from services.store.work import lost_content

_log = get_logger(__name__)

_AT_ONCE = 4
_FEW_LINES = 1_000
_Errors = Sequence[Mapping[str, object]]
_FAULT_MS = 5_000
"""Pause after a failure that ended nothing."""
_UNCHECKED = {
    "code": "server_error",
    "line": None,
    "message": "This input could not be checked: the server ended each time it tried. Split it "
    "into several files, and tell who runs this server.",
    "param": "file_id",
}


class _InputAwaitedError(Exception):
    """The input was not found, for the first time, or not read: it may be at the next look."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A batch that waits to be validated, with what it is held against.

    `file` is None where it is unknown, deleted, expired or another project's.
    """

    row: batches_repo.Row
    file: files_repo.Row | None
    models: Sequence[models_repo.Row]


def _waiting(connection: sa.Connection, now_ms: int) -> list[_Waiting]:
    """All that is read of a few batches, since a trip to a reader's thread costs more than this."""
    rows = batches_repo.to_validate(connection, _AT_ONCE, now_ms)
    models = models_repo.list_all(connection) if rows else []
    return [_Waiting(row, _file_of(connection, row, now_ms // 1000), models) for row in rows]


def _file_of(
    connection: sa.Connection, row: batches_repo.Row, now_at: int
) -> files_repo.Row | None:
    try:
        return files_repo.get(connection, row.input_file_id, ProjectId(row.project_id), now_at)
    except NotFoundError:
        return None


class Validator:
    """Moves batches from `validating` to `in_progress` or `failed`."""

    def __init__(self, context: Context, reader: InputReader) -> None:
        """Validate batches of `context`, reading indexes through `reader`."""
        self._context = context
        self._reader = reader
        # Number of the last batch that was there at the first turn.
        self._started_seq: int | None = None
        settings = context.settings
        self._limits = validate.Limits(
            max_batch_lines=settings.max_batch_lines,
            max_reported_errors=settings.max_reported_errors,
            max_line_bytes=settings.max_line_bytes,
            mixed_models=settings.mixed_models,
        )

    async def run_once(self) -> int:
        """Validate everything that waits and return how many; a failing one holds no other."""
        judged = 0
        more = True
        while more:
            found, more = await self._next()
            if not found:
                break
            outcomes = await asyncio.gather(
                *(self._judge(each) for each in found), return_exceptions=True
            )
            for each, outcome in zip(found, outcomes, strict=True):
                row = each.row
                if isinstance(outcome, BaseException):
                    fault = outcome.fault if isinstance(outcome, _InputAwaitedError) else None
                    if fault is None:
                        _log.error("validation_failed", batch=row.id, exc_info=outcome)
                    await self._put_off(row, fault)
                else:
                    judged += 1
            self._context.wake("outbox")
            self._context.wake("deliveries")
            self._context.wake("events")
        return judged

    async def _next(self) -> "tuple[Sequence[_Waiting], bool]":
        """Return what to validate now, in order, and whether there may be more.

        A try is counted before it begins, but only of a batch that waited when this store began:
        one of those may have ended the store before. They go one by one.
        """
        now_ms = self._context.now_ms()
        found = await self._context.db.read(lambda connection: _waiting(connection, now_ms))
        if not found:
            return found, False
        last = await self._seq_at_start()
        first = found[0].row
        if first.tries == 0 and first.seq > last:
            new = [each for each in found if each.row.tries == 0]
            # Whoever creates one wakes this loop once it is committed.
            return new, len(found) == _AT_ONCE or len(new) < len(found)
        if first.tries >= MOST_VALIDATIONS:
            return found[:1], True
        await self._context.db.write(
            "validate.claim",
            lambda connection: batches_repo.put_off(
                connection,
                first.id,
                tries=first.tries + 1,
                until_ms=now_ms + wait_ms(first.tries + 1),
            ),
        )
        return found[:1], True

    async def _seq_at_start(self) -> int:
        """Return the number of the last batch that was there at this store's first turn."""
        if self._started_seq is None:
            self._started_seq = await self._context.db.read(batches_repo.last_seq)
        return self._started_seq

    async def _put_off(self, row: batches_repo.Row, fault: str | None) -> None:
        """Let others go before a batch that could not be judged; the try counts for nothing."""
        until_ms = self._context.now_ms() + _FAULT_MS
        await self._context.db.write(
            "validate.put_off",
            lambda connection: batches_repo.put_off(
                connection, row.id, tries=row.tries, until_ms=until_ms, fault=fault
            ),
        )

    async def _judge(self, waiting: "_Waiting") -> None:
        row = waiting.row
        with telemetry.span_of("validate", row.traceparent, batch=row.id):
            if row.tries >= MOST_VALIDATIONS:
                await self._give_up(row)
                return
            found = await self._check(waiting)
        if isinstance(found, batches_repo.Input):
            await self._context.db.write(
                "batch.start",
                lambda connection: batches_repo.start(
                    connection, row, found, self._context.now_ms()
                ),
            )
        else:
            await self._context.db.write(
                "batch.fail",
                lambda connection: batches_repo.fail(
                    connection, row.id, found, self._context.now_ms()
                ),
            )

    async def _give_up(self, row: batches_repo.Row) -> None:
        now_ms = self._context.now_ms()
        _log.error("validation_given_up", batch=row.id, tries=row.tries)
        await self._context.db.write(
            "validate.give_up",
            lambda connection: batches_repo.fail(connection, row.id, [_UNCHECKED], now_ms),
        )

    async def _check(self, waiting: "_Waiting") -> batches_repo.Input | _Errors:
        row, file = waiting.row, waiting.file
        if file is None:
            return [
                _file_error(
                    f"Cannot find file {row.input_file_id}, or project {row.project_id} does not "
                    "have access to it."
                )
            ]
        if file.purpose != "batch":
            return [
                _file_error(
                    f"The file {file.id} has purpose '{file.purpose}'. Upload the input with "
                    "purpose 'batch'."
                )
            ]
        if file.index_blob is None:
            return [_file_error(f"The file {file.id} is too large for a batch; split it.")]
        try:
            return await self._check_lines(row, file, waiting.models)
        except BlobMissingError as error:
            _log.error("input_missing", batch=row.id, file=file.id, blob=error.name)
            words = lost_content.input_words(file.id, error)
            # Looked for twice: what was told until now may be that it could not be read.
            if row.fault != words:
                raise _InputAwaitedError(words) from None
            return [_lost_error(file.id)]
        except BlobUnreadableError as error:
            _log.error("input_unreadable", batch=row.id, file=file.id, blob=error.name)
            raise _InputAwaitedError(lost_content.input_words(file.id, error)) from None

    async def _check_lines(
        self, row: batches_repo.Row, file: files_repo.Row, models: Sequence[models_repo.Row]
    ) -> batches_repo.Input | _Errors:
        index = await self._reader.index(file.index_blob)
        served = models_repo.served(models)
        check = partial(
            validate.check_input,
            index,
            endpoint=row.endpoint,
            served_models=served,
            limits=self._limits,
        )
        # A few lines take less than the trip to a thread.
        verdict = check() if index.lines <= _FEW_LINES else await asyncio.to_thread(check)
        loop = asyncio.get_running_loop()

        def read_line(ordinal: int) -> bytes:
            offset, length = index.span(ordinal)
            reading = read_span(self._context.blobs, file.parts, offset, length)
            return asyncio.run_coroutine_threadsafe(reading, loop).result()

        if not verdict.sound:
            errors = await asyncio.to_thread(
                validate.faults,
                index,
                read_line,
                endpoint=row.endpoint,
                served_models=served,
                limits=self._limits,
                verdict=verdict,
            )
            if errors:
                return [asdict(error) for error in errors]
        pools = {model.name: model.pool_id for model in models}
        assert verdict.model is not None  # a sound file names one
        held: list[cutter.ModelLines] = []
        if self._limits.mixed_models:
            names = dict(enumerate(index.models))
            held = await asyncio.to_thread(cutter.models_of, index.records, names)
        return batches_repo.Input(
            model=verdict.model,
            pool_id=pools[verdict.model],
            models=[(each, pools[each.name]) for each in held] if len(held) > 1 else (),
            parts=[(name, size) for name, size in file.parts],
            index_blob=file.index_blob,
            lines=verdict.lines,
            bytes=file.bytes,
        )


def _lost_error(file_id: str) -> dict[str, object]:
    return {
        "code": "input_lost",
        "line": None,
        "message": f"The content of file {file_id} was lost from the server's storage. Delete the "
        "file, upload it again, and create the batch on the new one.",
        "param": "file_id",
    }


def _file_error(message: str) -> dict[str, object]:
    return {"code": "invalid_request", "line": None, "message": message, "param": "file_id"}
