"""The gRPC service `Work`: lines out, results in, and who may do which of them."""

from collections.abc import AsyncIterator
from typing import Any, Final

from protos.nightshift.v1 import work_pb2, work_pb2_grpc
from services.kit.wire.errors import InvalidRequestError
from services.store.batches import pools_repo
from services.store.batches.engines_repo import EngineNotes
from services.store.blobs.base import BlobMissingError, BlobUnreadableError
from services.store.context import Context
from services.store.domain import results
from services.store.domain.index.line_index import LineIndex
from services.store.inputs import attempt_source, input_lines
from services.store.inputs.input_reader import IndexPendingError, InputReader
from services.store.work import (
    chunks_repo,
    executors_repo,
    leadership_repo,
    lost_content,
    open_attempt,
    reclaim,
    window_repo,
)
from services.store.work.result_stream import Appender

_Context = Any  # ServicerContext is generic in its stubs only


MOST_START_MS: Final = 3_600_000
"""A start of an engine that takes longer counts as so long."""


class WorkServicer(work_pb2_grpc.WorkServicer):
    """Thin: messages in, repositories, messages out."""

    def __init__(self, context: Context, reader: InputReader) -> None:
        """Serve the work of `context`, reading line indexes through `reader`."""
        self._context = context
        self._reader = reader
        self._lease_ms = int(context.settings.lease_seconds * 1000)
        self._appender = Appender(context)
        self._engines = EngineNotes()

    # --- the scheduler's ------------------------------------------------------------------------

    async def Lead(self, request: work_pb2.LeadRequest, context: _Context) -> work_pb2.LeadResponse:
        """See work.proto."""
        if not request.holder:
            raise InvalidRequestError("A leader needs a name.", param="holder")
        found = await self._context.db.write(
            "leader.lead",
            lambda connection: leadership_repo.lead(
                connection,
                request.holder,
                ttl_ms=request.ttl_ms,
                now_ms=self._context.now_ms(),
            ),
        )
        return work_pb2.LeadResponse(
            leader=found.leader,
            term=found.term,
            current_holder=found.holder,
            left_ms=found.left_ms,
        )

    async def Resign(
        self, request: work_pb2.ResignRequest, context: _Context
    ) -> work_pb2.ResignResponse:
        """See work.proto."""
        await self._context.db.write(
            "leader.resign",
            lambda connection: leadership_repo.resign(
                connection, request.holder, term=request.term, now_ms=self._context.now_ms()
            ),
        )
        return work_pb2.ResignResponse()

    async def GetWindow(
        self, request: work_pb2.GetWindowRequest, context: _Context
    ) -> work_pb2.GetWindowResponse:
        """See work.proto."""
        now_ms = self._context.now_ms()
        most = window_repo.BATCHES_PER_POOL
        wanted = min(request.batches_per_pool or most, most)

        def look(connection: window_repo.Connection) -> work_pb2.GetWindowResponse:
            leadership_repo.require_term(connection, request.term, now_ms)
            pools = window_repo.pool_ids(connection)
            limit = min(wanted, max(1, window_repo.BATCHES // max(1, len(pools))))
            rows = window_repo.window(connection, pools=pools, limit=limit, now_ms=now_ms)
            return work_pb2.GetWindowResponse(
                batches=[window_repo.to_proto(row) for row in rows],
                pool_ids=pools,
                now_ms=now_ms,
                batches_per_pool=limit,
            )

        return await self._context.db.read(look)

    async def CutChunks(
        self, request: work_pb2.CutChunksRequest, context: _Context
    ) -> work_pb2.CutChunksResponse:
        """See work.proto."""
        if len(request.cuts) > window_repo.MAX_CUTS:
            raise InvalidRequestError(
                f"At most {window_repo.MAX_CUTS} chunks are cut at once.", param="cuts"
            )
        cuts = [
            window_repo.Cut(
                batch_id=cut.batch_id,
                pool_id=cut.pool_id,
                max_lines=cut.max_lines,
                max_bytes=cut.max_bytes,
            )
            for cut in request.cuts
        ]
        wanted = sorted({cut.batch_id for cut in cuts})
        names = await self._context.db.read(
            lambda connection: window_repo.indexes_of(connection, wanted, self._context.now_ms())
        )
        indexes = await self._indexes(names)

        def cut_all(connection: window_repo.Connection) -> work_pb2.CutChunksResponse:
            now_ms = self._context.now_ms()
            leadership_repo.require_term(connection, request.term, now_ms)
            made = window_repo.cut(
                connection, cuts, indexes=indexes, new_id=self._context.new_id, now_ms=now_ms
            )
            return work_pb2.CutChunksResponse(dispatches=made)

        return await self._context.db.write("chunk.cut", cut_all)

    async def _indexes(self, names: dict[str, str]) -> dict[str, LineIndex]:
        """Return the line index of each batch that can be had.

        One without it waits, perhaps for the operator, and nobody waits for it.
        """
        found = {}
        for batch_id, name in names.items():
            try:
                # Others need not wait for one that is being made again.
                found[batch_id] = await self._reader.index(name, patient=False)
            except IndexPendingError:
                continue
            except (BlobMissingError, BlobUnreadableError) as error:
                await lost_content.put_off(self._context, batch_id, error)
        return found

    async def ReportPools(
        self, request: work_pb2.ReportPoolsRequest, context: _Context
    ) -> work_pb2.ReportPoolsResponse:
        """See work.proto."""
        reports = [
            pools_repo.Report(
                pool_id=each.pool_id,
                executors_alive=each.executors_alive,
                executors_ready=each.executors_ready,
                seats=each.seats,
                lines_per_second=each.lines_per_second,
                trouble=" ".join(each.trouble.split())[: pools_repo.TROUBLE_LENGTH] or None,
            )
            for each in request.pools
        ]

        def note(connection: window_repo.Connection) -> None:
            now_ms = self._context.now_ms()
            leadership_repo.require_term(connection, request.term, now_ms)
            pools_repo.note(connection, reports, now_ms)

        await self._context.db.write("pool.report", note)
        return work_pb2.ReportPoolsResponse()

    async def ReclaimChunks(
        self, request: work_pb2.ReclaimChunksRequest, context: _Context
    ) -> work_pb2.ReclaimChunksResponse:
        """See work.proto."""
        idle = {queue.pool_id for queue in request.queues if queue.pending == 0}
        limit = min(request.limit or reclaim.LIMIT, reclaim.LIMIT)

        def reclaim_all(connection: window_repo.Connection) -> work_pb2.ReclaimChunksResponse:
            now_ms = self._context.now_ms()
            leadership_repo.require_term(connection, request.term, now_ms)
            raised = reclaim.reclaim(
                connection,
                idle_pools=idle,
                limit=limit,
                max_attempts=self._context.settings.max_attempts,
                new_id=self._context.new_id,
                now_ms=now_ms,
                leases=self._context.leases(),
            )
            return work_pb2.ReclaimChunksResponse(dispatches=raised)

        answer = await self._context.db.write("chunk.reclaim", reclaim_all)
        self._wake()
        return answer

    # --- the executors' -------------------------------------------------------------------------

    async def RegisterExecutor(
        self, request: work_pb2.RegisterExecutorRequest, context: _Context
    ) -> work_pb2.RegisterExecutorResponse:
        """See work.proto."""
        if not (request.executor_id and request.incarnation and request.pool_id):
            raise InvalidRequestError("An executor needs a name, an incarnation and a pool.")
        executor = executors_repo.Executor(
            id=request.executor_id,
            incarnation=request.incarnation,
            pool_id=request.pool_id,
            models=tuple(request.models),
            endpoints=tuple(request.endpoints),
            context_length=(request.context_length if request.HasField("context_length") else None),
            engine_revision=request.engine_revision,
        )
        await self._context.db.write(
            "executor.register",
            lambda connection: executors_repo.register(
                connection,
                executor,
                new_id=self._context.new_id,
                now_ms=self._context.now_ms(),
            ),
        )
        self._wake()
        return work_pb2.RegisterExecutorResponse(
            lease_ms=self._lease_ms, max_result_bytes=self._context.settings.max_result_bytes
        )

    async def OpenAttempt(
        self, request: work_pb2.OpenAttemptRequest, context: _Context
    ) -> work_pb2.OpenAttemptResponse:
        """See work.proto."""
        delivery = open_attempt.Delivery(
            chunk_id=request.chunk_id,
            dispatch=request.dispatch,
            num_delivered=request.num_delivered,
            executor_id=request.executor_id,
            incarnation=request.incarnation,
        )
        outcome = await self._context.db.write(
            "attempt.open",
            lambda connection: open_attempt.open_attempt(
                connection,
                delivery,
                engines=self._engines,
                leases=self._context.leases(),
                new_id=self._context.new_id,
                now_ms=self._context.now_ms(),
            ),
        )
        match outcome:
            case open_attempt.Opened():
                self._appender.remember(outcome.ticket)
                self._engines.keep(outcome.engine)
                return work_pb2.OpenAttemptResponse(
                    opened=work_pb2.AttemptOpened(
                        token=outcome.ticket.token,
                        attempt=outcome.number,
                        lines=chunks_repo.to_messages(outcome.lines),
                        deaths=outcome.chunk.deaths,
                        project_id=outcome.ticket.project_id,
                        endpoint=outcome.batch.endpoint,
                        # A batch of several models has chunks of one each.
                        model=outcome.chunk.model or outcome.batch.model,
                        expires_at_ms=outcome.batch.expires_ms,
                        alone=outcome.chunk.alone,
                        batch_id=outcome.ticket.batch_id,
                    )
                )
            case open_attempt.Gone():
                return work_pb2.OpenAttemptResponse(
                    gone=work_pb2.AttemptGone(reason=outcome.reason)
                )
            case open_attempt.Busy():
                return work_pb2.OpenAttemptResponse(
                    busy=work_pb2.AttemptBusy(retry_after_ms=outcome.left_ms)
                )

    async def ReadLines(
        self, request: work_pb2.ReadLinesRequest, context: _Context
    ) -> AsyncIterator[work_pb2.ReadLinesResponse]:
        """See work.proto."""
        source = await self._context.db.read(
            lambda connection: attempt_source.source_of(connection, request.token)
        )
        wanted = chunks_repo.from_messages(request.lines)
        if results.subtract(wanted, source.lines):
            raise InvalidRequestError("Lines outside the attempt's chunk.", param="lines")
        ordered = results.normalise(wanted)
        try:
            index = await self._reader.index(source.index_blob)
            async for records, payload in input_lines.frames(
                self._context.blobs, source.parts, index, ordered
            ):
                yield work_pb2.ReadLinesResponse(records=records, payload=payload)
        except (BlobMissingError, BlobUnreadableError) as error:
            told = await lost_content.put_off(
                self._context, source.batch_id, error, token=request.token
            )
            raise told from None
        if source.was_lost:
            await lost_content.found_again(self._context, source.batch_id)

    async def AppendResults(
        self, request_iterator: AsyncIterator[work_pb2.AppendResultsRequest], context: _Context
    ) -> AsyncIterator[work_pb2.AppendResultsResponse]:
        """See work.proto."""
        async for answer in self._appender.answers(request_iterator):
            yield answer

    async def Beat(self, request: work_pb2.BeatRequest, context: _Context) -> work_pb2.BeatResponse:
        """See work.proto."""
        started = {
            each.token: chunks_repo.pack_ranges(chunks_repo.from_messages(each.started))
            for each in request.attempts
        }
        if not started:
            return work_pb2.BeatResponse()
        drops = await self._context.db.write(
            "attempt.beat",
            lambda connection: open_attempt.beat(
                connection, started, lease_ms=self._lease_ms, now_ms=self._context.now_ms()
            ),
        )
        return work_pb2.BeatResponse(
            drops=[
                work_pb2.AttemptDrop(token=token, reason=reason) for token, reason in drops.items()
            ]
        )

    async def HandBack(
        self, request: work_pb2.HandBackRequest, context: _Context
    ) -> work_pb2.HandBackResponse:
        """See work.proto."""
        tokens = list(request.tokens)
        await self._context.db.write(
            "attempt.hand_back",
            lambda connection: executors_repo.hand_back(
                connection,
                request.executor_id,
                tokens,
                now_ms=self._context.now_ms(),
                trouble=request.trouble,
            ),
        )
        self._wake()
        return work_pb2.HandBackResponse()

    async def ReportDeath(
        self, request: work_pb2.ReportDeathRequest, context: _Context
    ) -> work_pb2.ReportDeathResponse:
        """See work.proto."""
        started = {each.token: chunks_repo.from_messages(each.started) for each in request.attempts}
        await self._context.db.write(
            "executor.death",
            lambda connection: executors_repo.report_death(
                connection,
                request.executor_id,
                started,
                complete=request.complete,
                start_ms=min(max(0, request.start_ms), MOST_START_MS),
                new_id=self._context.new_id,
                now_ms=self._context.now_ms(),
            ),
        )
        self._wake()
        return work_pb2.ReportDeathResponse()

    def _wake(self) -> None:
        self._context.wake("outbox")
        self._context.wake("ender")
        self._context.wake("poison")
