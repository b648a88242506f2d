"""The gRPC service `Uploads`, in the store."""

from collections.abc import AsyncIterator
from typing import Final

from protos.nightshift.v1 import uploads_pb2, uploads_pb2_grpc
from services.kit.calls.interceptors import Call, project_of
from services.kit.wire.client_numbers import check_range
from services.kit.wire.errors import InvalidRequestError
from services.store.context import Context
from services.store.files import intake, part_intake, upload_file, uploads_repo
from services.store.files.complete_upload import Completer

_STATUSES: Final = {
    "pending": uploads_pb2.UPLOAD_STATUS_PENDING,
    "completed": uploads_pb2.UPLOAD_STATUS_COMPLETED,
    "cancelled": uploads_pb2.UPLOAD_STATUS_CANCELLED,
    "expired": uploads_pb2.UPLOAD_STATUS_EXPIRED,
}


class UploadsServicer(uploads_pb2_grpc.UploadsServicer):
    """Thin: messages in, repository and blobs, messages out."""

    def __init__(self, context: Context) -> None:
        """Serve the uploads of `context`."""
        self._context = context
        self._completer = Completer(context)

    async def CreateUpload(
        self, request: uploads_pb2.CreateUploadRequest, context: Call
    ) -> uploads_pb2.CreateUploadResponse:
        """See uploads.proto."""
        upload_file.check_purpose(request.purpose)
        upload_file.check_filename(request.filename, param="filename")
        self._check_bytes(request)
        if request.HasField("expires_after"):
            upload_file.check_expiry(request.expires_after, "expires_after")
        asked = request.HasField("expires_after")
        project_id = project_of(context)
        quota = await intake.room_for(self._context, project_id)
        quota.require(request.bytes, param="bytes")
        upload = uploads_repo.NewUpload(
            id=f"upload_{self._context.new_id()}",
            project_id=project_id,
            purpose=request.purpose,
            filename=request.filename,
            bytes=request.bytes,
            created_at=self._now_at(),
            file_expires_seconds=request.expires_after.seconds if asked else None,
            hash_key=self._context.new_id(),
        )
        row = await self._context.db.write(
            "upload.create", lambda connection: uploads_repo.insert(connection, upload)
        )
        return uploads_pb2.CreateUploadResponse(upload=self._to_proto(row))

    def _check_bytes(self, request: uploads_pb2.CreateUploadRequest) -> None:
        settings = self._context.settings
        if not request.HasField("bytes"):
            raise InvalidRequestError(
                "Missing required parameter: 'bytes'.",
                code="missing_required_parameter",
                param="bytes",
            )
        most = settings.max_upload_bytes
        if request.purpose == "batch":
            most = min(most, settings.max_batch_file_bytes)
        check_range("bytes", request.bytes, 0, most)

    async def AddUploadPart(
        self, request_iterator: AsyncIterator[uploads_pb2.AddUploadPartRequest], context: Call
    ) -> uploads_pb2.AddUploadPartResponse:
        """See uploads.proto."""
        part = part_intake.Part(self._context, project_of(context))
        return uploads_pb2.AddUploadPartResponse(part=await part.receive(request_iterator))

    async def CompleteUpload(
        self, request: uploads_pb2.CompleteUploadRequest, context: Call
    ) -> uploads_pb2.CompleteUploadResponse:
        """See uploads.proto."""
        upload, file = await self._completer.complete(project_of(context), request)
        return uploads_pb2.CompleteUploadResponse(upload=self._to_proto(upload, file))

    async def CancelUpload(
        self, request: uploads_pb2.CancelUploadRequest, context: Call
    ) -> uploads_pb2.CancelUploadResponse:
        """See uploads.proto."""
        project_id = project_of(context)
        now_at = self._now_at()
        row = await self._context.db.write(
            "upload.cancel",
            lambda connection: uploads_repo.cancel(
                connection, request.upload_id, project_id, now_at
            ),
        )
        self._context.wake("sweeper")
        return uploads_pb2.CancelUploadResponse(upload=self._to_proto(row))

    def _now_at(self) -> int:
        return self._context.now_ms() // 1000

    def _to_proto(
        self, row: uploads_repo.Row, file: uploads_repo.Row | None = None
    ) -> uploads_pb2.Upload:
        return uploads_pb2.Upload(
            id=row.id,
            bytes=row.bytes,
            created_at=row.created_at,
            expires_at=row.expires_at,
            filename=row.filename,
            purpose=row.purpose,
            status=_STATUSES[uploads_repo.status_of(row, self._now_at())],
            file=None if file is None else upload_file.to_proto(file),
        )
