"""Judges the input of new batches from the line index made during upload."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from services.kit import telemetry
from services.kit.errors import NotFoundError
from services.kit.ids import ProjectId
from services.kit.log import get_logger
from services.store import batches_repo, files_repo, models_repo
from services.store.blobs.base import BlobMissingError
from services.store.context import Context
from services.store.domain import cutter, validate
from services.store.input_reader import InputReader, read_span

_log = get_logger(__name__)

_AT_ONCE = 4
_Errors = Sequence[Mapping[str, object]]


class Validator:
    """Moves batches from `validating` to `in_progress` or `failed`."""

    def __init__(self, context: Context, reader: InputReader) -> None:
        """Validate batches of `context`, reading indexes through `reader`."""
        self._context = context
        self._reader = reader
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
        while rows := await self._context.db.read(
            lambda connection: batches_repo.to_validate(connection, _AT_ONCE)
        ):
            outcomes = await asyncio.gather(
                *(self._judge(row) for row in rows), return_exceptions=True
            )
            for row, outcome in zip(rows, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    _log.error("validation_failed", batch=row.id, exc_info=outcome)
            if all(isinstance(outcome, BaseException) for outcome in outcomes):
                # Nothing moved: wait for the next tick rather than spin.
                break
            judged += len(rows)
            self._context.wake("outbox")
            self._context.wake("deliveries")
            self._context.wake("events")
        return judged

    async def _judge(self, row: batches_repo.Row) -> None:
        with telemetry.span_of("validate", row.traceparent, batch=row.id):
            found = await self._check(row)
        now_ms = self._context.now_ms()
        if isinstance(found, batches_repo.Input):
            await self._context.db.write(
                "batch.start", lambda connection: batches_repo.start(connection, row, found, now_ms)
            )
        else:
            await self._context.db.write(
                "batch.fail",
                lambda connection: batches_repo.fail(connection, row.id, found, now_ms),
            )

    async def _check(self, row: batches_repo.Row) -> batches_repo.Input | _Errors:
        project_id = ProjectId(row.project_id)
        now_at = self._context.now_ms() // 1000
        try:
            # Together, since each trip to a reader's thread costs as much as its statement.
            file, models = await self._context.db.read(
                lambda connection: (
                    files_repo.get(connection, row.input_file_id, project_id, now_at),
                    models_repo.list_all(connection),
                )
            )
        except NotFoundError:
            return [
                _file_error(
                    f"Cannot find file {row.input_file_id}, or project {project_id} does not have "
                    "access to it."
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
            return await self._check_lines(row, file, models)
        except BlobMissingError:
            _log.exception("input_missing", batch=row.id, file=file.id)
            return [_file_error(f"The content of file {file.id} is gone; upload it again.")]

    async def _check_lines(
        self, row: batches_repo.Row, file: files_repo.Row, models: Sequence[models_repo.Row]
    ) -> batches_repo.Input | _Errors:
        index = await self._reader.index(file.index_blob)
        served = models_repo.served(models)
        verdict = await asyncio.to_thread(
            validate.check_input,
            index,
            endpoint=row.endpoint,
            served_models=served,
            limits=self._limits,
        )
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


def _file_error(message: str) -> dict[str, object]:
    return {"code": "invalid_request", "line": None, "message": message, "param": "file_id"}
