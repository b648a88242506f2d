"""The public gRPC services: the same store, keys, checks, request ids and errors as REST has."""

import asyncio
from collections.abc import AsyncIterator

from protos.nightshift.v1 import (
    batches_pb2,
    batches_pb2_grpc,
    events_pb2_grpc,
    files_pb2,
    files_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    uploads_pb2_grpc,
    webhooks_pb2_grpc,
)
from services.gateway import checks
from services.gateway.context import Context
from services.gateway.grpc.call import (
    IDLE_CONNECTION_MS,
    MAX_CALLS,
    MAX_CONNECTIONS,
    OTHER_CALLS,
    AuthInterceptor,
    FirstMessageInterceptor,
    Frames,
    RequestInterceptor,
    Servicer,
    ShareInterceptor,
)
from services.gateway.grpc.events import EventsServicer
from services.gateway.grpc.uploads import UploadsServicer
from services.gateway.grpc.webhooks import WebhooksServicer
from services.gateway.rest.download import SEND_SECONDS, refuse_download
from services.kit.calls import interceptors, rpc
from services.kit.calls.interceptors import Call
from services.kit.wire.client_numbers import check_range
from services.kit.wire.errors import InternalError, InvalidRequestError
from services.kit.wire.frames import FRAME_BYTES


async def start_public_server(context: Context, listen: str) -> rpc.RunningServer:
    """Serve the public services on `listen`.

    Raises:
        SettingsError: the port is taken, or the address is not this machine's.
    """
    services = [
        rpc.ServiceEntry(
            "nightshift.v1.Files",
            FilesServicer(context),
            files_pb2_grpc.add_FilesServicer_to_server,
        ),
        rpc.ServiceEntry(
            "nightshift.v1.Uploads",
            UploadsServicer(context),
            uploads_pb2_grpc.add_UploadsServicer_to_server,
        ),
        rpc.ServiceEntry(
            "nightshift.v1.Batches",
            BatchesServicer(context),
            batches_pb2_grpc.add_BatchesServicer_to_server,
        ),
        rpc.ServiceEntry(
            "nightshift.v1.Events",
            EventsServicer(context),
            events_pb2_grpc.add_EventsServicer_to_server,
        ),
        rpc.ServiceEntry(
            "nightshift.v1.Models",
            ModelsServicer(context),
            models_pb2_grpc.add_ModelsServicer_to_server,
        ),
        rpc.ServiceEntry(
            "nightshift.v1.Webhooks",
            WebhooksServicer(context),
            webhooks_pb2_grpc.add_WebhooksServicer_to_server,
        ),
    ]
    around = [
        interceptors.TelemetryInterceptor(),
        RequestInterceptor(context),
        interceptors.ErrorsInterceptor(),
        ShareInterceptor(),
        AuthInterceptor(context),
        FirstMessageInterceptor(),
    ]
    return await rpc.start_server(
        listen,
        services,
        around,
        setting="NIGHTSHIFT_GATEWAY_GRPC_LISTEN",
        most_calls=MAX_CALLS + OTHER_CALLS,
        options=[
            ("grpc.max_connection_idle_ms", IDLE_CONNECTION_MS),
            ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ],
    )


class FilesServicer(Servicer, files_pb2_grpc.FilesServicer):
    """Files, forwarded."""

    async def UploadFile(
        self, request_iterator: AsyncIterator[files_pb2.UploadFileRequest], context: Call
    ) -> files_pb2.UploadFileResponse:
        """See files.proto; a stream that breaks off is cancelled in the store too."""
        caller = self._keyed_caller(context)
        frames = Frames(request_iterator)
        first = await frames.next()
        if first is None or not first.HasField("header"):
            raise InvalidRequestError("The first frame of an upload must be its header.")
        if not first.header.filename:
            raise InvalidRequestError("'file' needs a filename that is not empty.", param="file")
        async with self._store.upload(caller) as upload:
            await upload.write(first)
            while (frame := await frames.next()) is not None:
                match frame.WhichOneof("frame"):
                    case "data" if len(frame.data) <= FRAME_BYTES:
                        await upload.write(frame)
                    case "footer":
                        _check_footer(frame.footer)
                        return await upload.finish(frame)
                    case "data":
                        raise InvalidRequestError(
                            f"A frame may hold at most {FRAME_BYTES} bytes of content."
                        )
                    case _:
                        raise InvalidRequestError(
                            "After its header, an upload has data frames and one footer."
                        )
        raise InvalidRequestError("The upload ended without its footer; nothing was kept.")

    async def GetFile(
        self, request: files_pb2.GetFileRequest, context: Call
    ) -> files_pb2.GetFileResponse:
        """See files.proto."""
        checks.file_id_of(request.file_id)
        return await self._store.call(self._store.files.GetFile, request, self._caller())

    async def ListFiles(
        self, request: files_pb2.ListFilesRequest, context: Call
    ) -> files_pb2.ListFilesResponse:
        """See files.proto."""
        if request.page.limit:
            check_range("limit", request.page.limit, 1, checks.MAX_FILES_LIMIT)
        if request.page.after:
            checks.file_id_of(request.page.after, param="after")
        return await self._store.call(self._store.files.ListFiles, request, self._caller())

    async def DeleteFile(
        self, request: files_pb2.DeleteFileRequest, context: Call
    ) -> files_pb2.DeleteFileResponse:
        """See files.proto."""
        checks.file_id_of(request.file_id)
        return await self._store.call(self._store.files.DeleteFile, request, self._caller())

    # Writes by itself rather than yielding, so that a client that takes nothing can be given up.
    async def ReadFile(  # type: ignore[override]
        self, request: files_pb2.ReadFileRequest, context: Call
    ) -> None:
        """See files.proto."""
        checks.file_id_of(request.file_id)
        async with self._store.read(request, self._caller()) as stream:
            frame = await stream.read()
            if frame is None or not frame.HasField("file"):
                raise InternalError("The file's content came without its description.")
            refuse_download(frame.file)
            while frame is not None:
                try:
                    async with asyncio.timeout(SEND_SECONDS):
                        await context.write(frame)
                except TimeoutError:
                    raise InternalError("The client took nothing for too long.") from None
                frame = await stream.read()


class BatchesServicer(Servicer, batches_pb2_grpc.BatchesServicer):
    """Batches, forwarded."""

    async def CreateBatch(
        self, request: batches_pb2.CreateBatchRequest, context: Call
    ) -> batches_pb2.CreateBatchResponse:
        """See batches.proto."""
        checks.check_create_batch(request, self._context.windows)
        return await self._store.call(
            self._store.batches.CreateBatch, request, self._keyed_caller(context)
        )

    async def GetBatch(
        self, request: batches_pb2.GetBatchRequest, context: Call
    ) -> batches_pb2.GetBatchResponse:
        """See batches.proto."""
        checks.batch_id_of(request.batch_id)
        return await self._store.call(self._store.batches.GetBatch, request, self._caller())

    async def ListBatches(
        self, request: batches_pb2.ListBatchesRequest, context: Call
    ) -> batches_pb2.ListBatchesResponse:
        """See batches.proto."""
        if request.page.limit:
            check_range("limit", request.page.limit, 1, checks.MAX_BATCHES_LIMIT)
        if request.page.after:
            checks.batch_id_of(request.page.after, param="after")
        return await self._store.call(self._store.batches.ListBatches, request, self._caller())

    async def CancelBatch(
        self, request: batches_pb2.CancelBatchRequest, context: Call
    ) -> batches_pb2.CancelBatchResponse:
        """See batches.proto."""
        checks.batch_id_of(request.batch_id)
        return await self._store.call(self._store.batches.CancelBatch, request, self._caller())

    async def GetUsage(
        self, request: batches_pb2.GetUsageRequest, context: Call
    ) -> batches_pb2.GetUsageResponse:
        """See batches.proto."""
        return await self._store.call(self._store.batches.GetUsage, request, self._caller())


class ModelsServicer(Servicer, models_pb2_grpc.ModelsServicer):
    """Models, forwarded."""

    async def ListModels(
        self, request: models_pb2.ListModelsRequest, context: Call
    ) -> models_pb2.ListModelsResponse:
        """See models.proto."""
        return await self._store.call(self._store.models.ListModels, request, self._caller())

    async def GetModel(
        self, request: models_pb2.GetModelRequest, context: Call
    ) -> models_pb2.GetModelResponse:
        """See models.proto."""
        return await self._store.call(self._store.models.GetModel, request, self._caller())


def _check_footer(footer: files_pb2.UploadFileFooter) -> None:
    if not footer.HasField("purpose"):
        raise InvalidRequestError("'purpose' is a required property")
    checks.purpose_of(footer.purpose)
    if footer.HasField("expires_after"):
        checks.check_expiry("expires_after", footer.expires_after)
