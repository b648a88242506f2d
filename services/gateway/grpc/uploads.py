"""The public gRPC service `Uploads`."""

from collections.abc import AsyncIterator

from protos.nightshift.v1 import uploads_pb2, uploads_pb2_grpc
from services.gateway import upload_checks
from services.gateway.grpc.call import Frames, Servicer
from services.kit.calls.interceptors import Call
from services.kit.wire.errors import InvalidRequestError
from services.kit.wire.frames import FRAME_BYTES


class UploadsServicer(Servicer, uploads_pb2_grpc.UploadsServicer):
    """Uploads, forwarded."""

    async def CreateUpload(
        self, request: uploads_pb2.CreateUploadRequest, context: Call
    ) -> uploads_pb2.CreateUploadResponse:
        """See uploads.proto."""
        upload_checks.check_create(request)
        return await self._store.call(self._store.uploads.CreateUpload, request, self._caller())

    async def AddUploadPart(
        self, request_iterator: AsyncIterator[uploads_pb2.AddUploadPartRequest], context: Call
    ) -> uploads_pb2.AddUploadPartResponse:
        """See uploads.proto; a stream that breaks off is cancelled in the store too."""
        frames = Frames(request_iterator)
        first = await frames.next()
        if first is None or not first.HasField("header"):
            raise InvalidRequestError("The first frame of a part must be its header.")
        upload_checks.upload_id_of(first.header.upload_id)
        async with self._store.upload_part(self._caller()) as part:
            await part.write(first)
            while (frame := await frames.next()) is not None:
                match frame.WhichOneof("frame"):
                    case "data" if len(frame.data) <= FRAME_BYTES:
                        await part.write(frame)
                    case "footer":
                        return await part.finish(frame)
                    case "data":
                        raise InvalidRequestError(
                            f"A frame may hold at most {FRAME_BYTES} bytes of content."
                        )
                    case _:
                        raise InvalidRequestError(
                            "After its header, a part has data frames and one footer."
                        )
        raise InvalidRequestError("The part ended without its footer; nothing was kept.")

    async def CompleteUpload(
        self, request: uploads_pb2.CompleteUploadRequest, context: Call
    ) -> uploads_pb2.CompleteUploadResponse:
        """See uploads.proto."""
        upload_checks.upload_id_of(request.upload_id)
        return await self._store.complete_upload(request, self._caller())

    async def CancelUpload(
        self, request: uploads_pb2.CancelUploadRequest, context: Call
    ) -> uploads_pb2.CancelUploadResponse:
        """See uploads.proto."""
        upload_checks.upload_id_of(request.upload_id)
        return await self._store.call(self._store.uploads.CancelUpload, request, self._caller())
