"""The gRPC service `Batches`, in the store."""

import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, batches_pb2_grpc
from services.kit.calls import rpc
from services.kit.calls.interceptors import Call, metadata_value, project_of
from services.kit.wire.endpoints import ENDPOINTS
from services.kit.wire.errors import InvalidRequestError
from services.kit.wire.ids import BatchId
from services.store.admin import idempotency_repo, usage_repo
from services.store.admin.audit import record
from services.store.batches import batches_repo, pools_repo
from services.store.context import Context
from services.store.db.paging import fitting, page_of
from services.store.domain.explanation import Explanation, explain
from services.store.domain.state import BatchStatus
from services.store.files import upload_file

DEFAULT_PAGE = 20
MAX_PAGE = 100


class BatchesServicer(batches_pb2_grpc.BatchesServicer):
    """Thin: messages in, repository, messages out."""

    def __init__(self, context: Context) -> None:
        """Serve the batches of `context`."""
        self._context = context

    async def CreateBatch(
        self, request: batches_pb2.CreateBatchRequest, context: Call
    ) -> batches_pb2.CreateBatchResponse:
        """See batches.proto."""
        project_id = project_of(context)
        if request.endpoint not in ENDPOINTS:
            supported = ", ".join(f"'{endpoint}'" for endpoint in ENDPOINTS)
            raise InvalidRequestError(
                f"Invalid value: '{request.endpoint}'. Supported values are: {supported}.",
                code="invalid_value",
                param="endpoint",
            )
        if request.completion_window_seconds <= 0:
            raise InvalidRequestError(
                "A completion window must be longer than nothing.",
                code="invalid_value",
                param="completion_window",
            )
        expires_after = None
        if request.HasField("output_expires_after"):
            upload_file.check_expiry(request.output_expires_after, "output_expires_after")
            expires_after = request.output_expires_after.seconds
        batch = batches_repo.NewBatch(
            id=BatchId(f"batch_{self._context.new_id()}"),
            project_id=project_id,
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            completion_window_seconds=request.completion_window_seconds,
            metadata=dict(request.metadata) if request.has_metadata else None,
            output_expires_seconds=expires_after,
            key_id=metadata_value(context, rpc.API_KEY_ID_KEY) or None,
            traceparent=metadata_value(context, "traceparent"),
        )
        await self._context.disk.require_room()
        row = await self._insert(batch, metadata_value(context, rpc.IDEMPOTENCY_KEY))
        self._context.wake("validator")
        return batches_pb2.CreateBatchResponse(batch=await self._shown(row))

    async def _insert(self, batch: batches_repo.NewBatch, idempotency_key: str) -> batches_repo.Row:
        now_ms = self._context.now_ms()
        request = idempotency_repo.keyed(
            batch.project_id,
            idempotency_key,
            "batch",
            batch.input_file_id,
            batch.endpoint,
            batch.completion_window,
            batch.metadata,
            batch.output_expires_seconds,
        )
        return await self._context.db.write(
            "batch.create",
            lambda connection: idempotency_repo.once(
                connection,
                request,
                now_ms,
                make=lambda: batches_repo.insert(connection, batch, now_ms),
                find=lambda batch_id: batches_repo.get(connection, batch_id, batch.project_id),
            ),
        )

    async def GetBatch(
        self, request: batches_pb2.GetBatchRequest, context: Call
    ) -> batches_pb2.GetBatchResponse:
        """See batches.proto."""
        project_id = project_of(context)
        now_ms = self._context.now_ms()

        def look(connection: sa.Connection) -> batches_pb2.Batch:
            row = batches_repo.get(connection, request.batch_id, project_id)
            (explanation,) = pools_repo.explanations(connection, [row], now_ms)
            return to_proto(row, explanation)

        return batches_pb2.GetBatchResponse(batch=await self._context.db.read(look))

    async def ListBatches(
        self, request: batches_pb2.ListBatchesRequest, context: Call
    ) -> batches_pb2.ListBatchesResponse:
        """See batches.proto."""
        project_id = project_of(context)
        page = page_of(request.page, default=DEFAULT_PAGE, most=MAX_PAGE)
        now_ms = self._context.now_ms()

        def look(connection: sa.Connection) -> batches_pb2.ListBatchesResponse:
            rows, has_more = batches_repo.list_page(
                connection, project_id=project_id, after=page.after, limit=page.limit
            )
            explained = pools_repo.explanations(connection, rows, now_ms)
            found, are_all = fitting(map(to_proto, rows, explained))
            return batches_pb2.ListBatchesResponse(batches=found, has_more=has_more or not are_all)

        return await self._context.db.read(look)

    async def CancelBatch(
        self, request: batches_pb2.CancelBatchRequest, context: Call
    ) -> batches_pb2.CancelBatchResponse:
        """See batches.proto."""
        project_id = project_of(context)
        row = await self._context.db.write(
            "batch.cancel",
            # Its time is that of its commit: from then on executors have 2 s to flush.
            lambda connection: batches_repo.cancel(
                connection, request.batch_id, project_id, self._context.now_ms()
            ),
        )
        self._context.wake("outbox")
        self._context.wake("ender")
        self._context.wake("events")
        record(context, "batch_cancelled", batch=request.batch_id)
        return batches_pb2.CancelBatchResponse(batch=await self._shown(row))

    async def _shown(self, row: batches_repo.Row) -> batches_pb2.Batch:
        if row.pool_id is None:
            # Not validated yet: there is nothing to look up.
            return to_proto(row, explain(BatchStatus(row.status), None, 0, fault=row.fault))
        now_ms = self._context.now_ms()
        (explanation,) = await self._context.db.read(
            lambda connection: pools_repo.explanations(connection, [row], now_ms)
        )
        return to_proto(row, explanation)

    async def GetUsage(
        self, request: batches_pb2.GetUsageRequest, context: Call
    ) -> batches_pb2.GetUsageResponse:
        """See batches.proto."""
        project_id = project_of(context)
        async with self._context.summing:
            by_key = await self._context.db.read(
                lambda connection: usage_repo.by_key(connection, project_id)
            )
        return batches_pb2.GetUsageResponse(project_id=project_id, by_key=by_key)


def to_proto(row: batches_repo.Row, explanation: Explanation) -> batches_pb2.Batch:
    """Return a batch's row as its message, with what it waits for."""
    return batches_pb2.Batch(
        id=row.id,
        endpoint=row.endpoint,
        model=row.model,
        errors=[
            batches_pb2.BatchError(
                code=error["code"],
                line=error["line"],
                message=error["message"],
                param=error["param"],
            )
            for error in row.errors or ()
        ],
        input_file_id=row.input_file_id,
        completion_window=row.completion_window,
        status=batches_pb2.BatchStatus.Value(f"BATCH_STATUS_{row.status.upper()}"),
        output_file_id=row.output_file_id,
        error_file_id=row.error_file_id,
        created_at=row.created_at,
        in_progress_at=row.in_progress_at,
        expires_at=row.expires_ms // 1000,
        finalizing_at=row.finalizing_at,
        completed_at=row.completed_at,
        failed_at=row.failed_at,
        expired_at=row.expired_at,
        cancelling_at=row.cancelling_at,
        cancelled_at=row.cancelled_at,
        request_counts=usage_repo.counts_of(row),
        usage=usage_repo.usage_of(row),
        metadata=row.metadata or {},
        has_metadata=row.metadata is not None,
        nightshift=batches_pb2.BatchExplanation(
            pool=explanation.pool,
            queue_position=explanation.queue_position,
            executors=explanation.executors,
            reason=explanation.reason,
            engine_revision=explanation.engine_revision,
            engines=[
                batches_pb2.BatchEngines(pool=each.pool, revisions=each.revisions)
                for each in explanation.engines
            ],
        ),
    )
