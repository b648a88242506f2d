"""Gives up lines that kill their engines.

In a loop of its own, since it reads the lines: a bucket that is away keeps it waiting, and cancels
and deadlines must not wait with it.
"""

from typing import Any

import sqlalchemy as sa

from services.kit.process.log import get_logger
from services.kit.wire.result_line import ENGINE_FAILURE, ENGINE_FAILURE_UNTRIED
from services.store.blobs.base import BlobMissingError, BlobUnreadableError
from services.store.context import Context
from services.store.domain import output
from services.store.inputs import input_lines
from services.store.inputs.input_reader import IndexPendingError, InputReader
from services.store.work import attempts_repo, deaths_repo, lost_content, quarantine
from services.store.work.result_stream import Appender
from services.store.work.results_repo import Frame

_log = get_logger(__name__)

Row = sa.Row[*tuple[Any, ...]]


class PoisonLines:
    """Ends lines that died alone in the engine too often."""

    def __init__(self, context: Context, reader: InputReader) -> None:
        """Give up lines of `context`, reading line indexes through `reader`."""
        self._context = context
        self._reader = reader
        self._appender = Appender(context)

    async def run_once(self) -> int:
        """Record the error of lines that died alone too often; return how many."""
        most = self._context.settings.max_attempts
        given_up = 0
        while rows := await self._context.db.read(
            lambda connection: deaths_repo.poison(connection, most, self._context.now_ms())
        ):
            before = given_up
            try:
                for row in rows:
                    given_up += await self._give_up_one(row)
            except IndexPendingError:
                # It may be there the next time.
                break
            if given_up == before:
                # So may what cannot be read now.
                break
        if given_up:
            self._context.wake("outbox")
            self._context.wake("finalizer")
            self._context.wake("deliveries")
            self._context.wake("events")
        return given_up

    async def _give_up_one(self, chunk: Row) -> int:
        try:
            failure = await self._failure(chunk)
        except (BlobMissingError, BlobUnreadableError) as error:
            await lost_content.put_off(self._context, chunk.batch_id, error)
            return 0
        await self._appender.record(failure)
        _log.warning("line_given_up", batch=chunk.batch_id, line=chunk.first_line)
        return 1

    async def _failure(self, chunk: Row) -> Frame:
        """The result that the store writes itself for the single line of a chunk."""
        index = await self._reader.index(chunk.index_blob, patient=False)
        parts = [(name, size) for name, size in chunk.input_parts]
        ids: list[bytes | None] = []
        async for _, some in input_lines.custom_ids(
            self._context.blobs, parts, index, [(chunk.first_line, 1)]
        ):
            ids.extend(some)
        records, payload = output.unanswered_frame(
            chunk.batch_id,
            [chunk.first_line],
            ids,
            ENGINE_FAILURE
            if chunk.deaths_alone < quarantine.UNTRIED_DEATHS
            else ENGINE_FAILURE_UNTRIED,
        )
        return Frame(
            ticket=attempts_repo.Ticket(
                token="",
                batch_id=chunk.batch_id,
                chunk_id=chunk.id,
                project_id=chunk.project_id,
                dispatch=chunk.dispatch,
            ),
            records=records,
            payload=payload,
        )
