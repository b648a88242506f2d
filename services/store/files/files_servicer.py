"""The gRPC service `Files`, in the store."""

from collections.abc import AsyncIterator
from typing import Final

from protos.nightshift.v1 import files_pb2, files_pb2_grpc
from services.kit.calls import rpc
from services.kit.calls.interceptors import Call, metadata_value, project_of
from services.kit.process.log import get_logger
from services.kit.wire.client_numbers import check_range
from services.kit.wire.errors import NotFoundError, RangeNotSatisfiableError
from services.kit.wire.frames import FRAME_BYTES
from services.store.admin.audit import record
from services.store.blobs.base import BlobMissingError
from services.store.context import Context
from services.store.db.paging import fitting, page_of
from services.store.files import files_repo, upload_file
from services.store.inputs.input_reader import read_span
from services.store.work import lost_content

_log = get_logger(__name__)

MAX_PAGE = 10_000
_ANY: Final = 2**63 - 1


class FilesServicer(files_pb2_grpc.FilesServicer):
    """Thin: messages in, repository and blobs, messages out."""

    def __init__(self, context: Context) -> None:
        """Serve the files of `context`."""
        self._context = context

    async def UploadFile(
        self, request_iterator: AsyncIterator[files_pb2.UploadFileRequest], context: Call
    ) -> files_pb2.UploadFileResponse:
        """See files.proto."""
        upload = upload_file.Upload(
            self._context,
            project_of(context),
            idempotency_key=metadata_value(context, rpc.IDEMPOTENCY_KEY),
        )
        return files_pb2.UploadFileResponse(file=await upload.receive(request_iterator))

    async def GetFile(
        self, request: files_pb2.GetFileRequest, context: Call
    ) -> files_pb2.GetFileResponse:
        """See files.proto."""
        row = await self._row(request.file_id, context)
        return files_pb2.GetFileResponse(file=upload_file.to_proto(row))

    async def _row(self, file_id: str, context: Call) -> files_repo.Row:
        project_id = project_of(context)
        now_at = self._context.now_ms() // 1000
        return await self._context.db.read(
            lambda connection: files_repo.get(connection, file_id, project_id, now_at)
        )

    async def ListFiles(
        self, request: files_pb2.ListFilesRequest, context: Call
    ) -> files_pb2.ListFilesResponse:
        """See files.proto."""
        project_id = project_of(context)
        page = page_of(request.page, default=MAX_PAGE, most=MAX_PAGE)
        now_at = self._context.now_ms() // 1000
        rows, has_more = await self._context.db.read(
            lambda connection: files_repo.list_page(
                connection,
                project_id=project_id,
                now_at=now_at,
                purpose=request.purpose,
                after=page.after,
                limit=page.limit,
                ascending=request.ascending,
            )
        )
        files, are_all = fitting(map(upload_file.to_proto, rows))
        return files_pb2.ListFilesResponse(files=files, has_more=has_more or not are_all)

    async def DeleteFile(
        self, request: files_pb2.DeleteFileRequest, context: Call
    ) -> files_pb2.DeleteFileResponse:
        """See files.proto."""
        project_id = project_of(context)
        now_at = self._context.now_ms() // 1000
        await self._context.db.write(
            "file.delete",
            lambda connection: files_repo.delete(connection, request.file_id, project_id, now_at),
        )
        self._context.wake("sweeper")
        record(context, "file_deleted", file=request.file_id)
        return files_pb2.DeleteFileResponse(file_id=request.file_id)

    async def ReadFile(
        self, request: files_pb2.ReadFileRequest, context: Call
    ) -> AsyncIterator[files_pb2.ReadFileResponse]:
        """See files.proto."""
        row = await self._row(request.file_id, context)
        file = upload_file.to_proto(row)
        offset, end = _span(request, row.bytes)
        first: files_pb2.File | None = file
        while first is not None or offset < end:
            wanted = min(FRAME_BYTES, max(0, end - offset))
            data = b""
            if wanted:
                data = await self._read(row, offset, wanted)
            yield files_pb2.ReadFileResponse(file=first, data=data)
            first = None
            offset += wanted

    async def _read(self, row: files_repo.Row, offset: int, length: int) -> bytes:
        try:
            return await read_span(self._context.blobs, row.parts, offset, length)
        except BlobMissingError as error:
            missing = error
        if not await self._context.db.read(
            lambda connection: lost_content.is_lost(connection, missing)
        ):
            raise NotFoundError(f"No such File object: {row.id}", param="id")
        _log.error("content_missing", file=row.id, blob=missing.name)
        raise lost_content.content_lost(row.id, of_batch=row.of_batch_id is not None)


def _span(request: files_pb2.ReadFileRequest, size: int) -> tuple[int, int]:
    """Return the first byte wanted and the one after the last.

    Raises:
        InvalidRequestError: a negative offset or length.
        RangeNotSatisfiableError: the file ends before the offset.
    """
    check_range("offset", request.offset, 0, _ANY)
    if request.offset and request.offset >= size:
        raise RangeNotSatisfiableError(
            f"The file has {size} bytes, so that none begins at offset {request.offset}.",
            param="offset",
        )
    if not request.HasField("length"):
        return request.offset, size
    check_range("length", request.length, 0, _ANY)
    return request.offset, min(size, request.offset + request.length)
