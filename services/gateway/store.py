"""The store as the gateway calls it: every fault comes out as one of ours."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

import grpc

from protos.nightshift.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    batches_pb2_grpc,
    events_pb2_grpc,
    files_pb2,
    files_pb2_grpc,
    models_pb2_grpc,
    uploads_pb2,
    uploads_pb2_grpc,
    webhooks_pb2_grpc,
)
from services.gateway.auth import Caller
from services.gateway.rest.pace import IDLE_SECONDS
from services.gateway.shares import Shares
from services.kit.calls import rpc
from services.kit.process.log import get_logger
from services.kit.wire.errors import InternalError, UnavailableError, from_rpc_error
from services.kit.wire.frames import FRAME_BYTES

CONNECT_SECONDS: Final = 5.0
"""A store that restarts is waited for this long before a stream is opened."""

MAX_UPLOADS: Final = 128
"""Uploads at once; a stalled one holds up to 14 MiB in gRPC's own buffers."""
MAX_DOWNLOADS: Final = 128
"""The same of downloads."""

_log = get_logger(__name__)

RequestT = TypeVar("RequestT", contravariant=True)  # noqa: PLC0105 - reads better
AnswerT = TypeVar("AnswerT", covariant=True)  # noqa: PLC0105 - reads better


class UnaryMethod(Protocol[RequestT, AnswerT]):
    """One method of a stub, request and answer both single."""

    def __call__(
        self, request: RequestT, *, metadata: tuple[tuple[str, str], ...]
    ) -> Awaitable[AnswerT]:
        """Call it."""
        ...


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """Turn a failed call into the error that the store raised, or the nearest one of ours."""
    try:
        yield
    except rpc.CallFault as fault:
        if fault.code() is grpc.StatusCode.UNAUTHENTICATED:
            # Who calls was settled before; this is about us, and no client's key can mend it.
            _log.error("store_refuses_secret")
            raise InternalError("The gateway and the store behind it do not fit.") from None
        raise from_rpc_error(fault) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # grpcio raises this too when the *other* side cancelled, which must not end our task.
        raise _unavailable() from None


def _unavailable() -> UnavailableError:
    return UnavailableError(
        "The service behind this request is not available right now; try again.",
        retry_after_seconds=1.0,
    )


class UploadStream(Generic[RequestT, AnswerT]):
    """A file, or a part of one, on its way to the store; only what `finish` returns for is kept."""

    def __init__(self, call: Any, frame: Callable[[bytes], RequestT]) -> None:
        """Write to `call`, which the caller closes; `frame` makes a frame of content."""
        self._call = call
        self._frame = frame
        self._end = rpc.StreamEnd(call)
        self._parts: list[bytes] = []
        self._size = 0

    async def write(self, request: RequestT) -> None:
        """Send one frame as it is, once the store has room for it.

        Raises:
            NightshiftError: the store has refused the upload.
        """
        await self._guarded(lambda: self._call.write(request))

    async def data(self, data: bytes) -> None:
        """Send content in frames as large as allowed; holds at most one of them back."""
        view = memoryview(data)
        while self._size + len(view) >= FRAME_BYTES:
            room = FRAME_BYTES - self._size
            self._parts.append(bytes(view[:room]))
            view = view[room:]
            await self._flush()
        if view:
            self._parts.append(bytes(view))
            self._size += len(view)

    async def _flush(self) -> None:
        if self._parts:
            data = b"".join(self._parts)
            self._parts, self._size = [], 0
            await self.write(self._frame(data))

    async def finish(self, footer: RequestT) -> AnswerT:
        """Send what is left and the last frame; returns once all is durable.

        Raises:
            NightshiftError: the store has refused the upload.
        """
        await self._flush()
        await self.write(footer)

        async def answer() -> Any:
            await self._call.done_writing()
            return await self._call

        response: AnswerT = await self._guarded(answer)
        return response

    async def _guarded(self, step: Callable[[], Awaitable[Any]]) -> Any:
        with faults():
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    try:
                        return await step()
                    except asyncio.InvalidStateError:
                        # The store ended the call before this frame: its answer says why.
                        await self._call
                        raise InternalError("The upload ended before its last byte.") from None
            except rpc.CallFault as fault:
                raise (await self._end.fault(fault)) from None
            except TimeoutError:
                raise _unavailable() from None


FileUpload: TypeAlias = UploadStream[files_pb2.UploadFileRequest, files_pb2.UploadFileResponse]
PartUpload: TypeAlias = UploadStream[
    uploads_pb2.AddUploadPartRequest, uploads_pb2.AddUploadPartResponse
]


class FileStream:
    """One file on its way from the store."""

    def __init__(self, call: Any) -> None:
        """Read from `call`, which the caller closes."""
        self._call = call

    def cancel(self) -> None:
        """End it early; a `read` that waits raises."""
        self._call.cancel()

    async def read(self) -> files_pb2.ReadFileResponse | None:
        """Return the next frame; None at the end.

        Raises:
            NightshiftError: the store has failed or refused.
        """
        with faults():
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    frame = await self._call.read()
            except TimeoutError:
                raise _unavailable() from None
        return None if frame is grpc.aio.EOF else frame


class Store:
    """The store's public services, called for a project."""

    def __init__(self, channel: grpc.aio.Channel, secret: str) -> None:
        """Call over `channel`, which the caller closes."""
        self._channel = channel
        self._secret = secret
        self._uploads = Shares(MAX_UPLOADS)
        self._downloads = Shares(MAX_DOWNLOADS)
        self.files = files_pb2_grpc.FilesStub(channel)
        self.uploads = uploads_pb2_grpc.UploadsStub(channel)
        self.batches = batches_pb2_grpc.BatchesStub(channel)
        self.events = events_pb2_grpc.EventsStub(channel)
        self.models = models_pb2_grpc.ModelsStub(channel)
        self.webhooks = webhooks_pb2_grpc.WebhooksStub(channel)
        self._admin = admin_pb2_grpc.AdminStub(channel)

    async def call(
        self, method: UnaryMethod[RequestT, AnswerT], request: RequestT, caller: Caller
    ) -> AnswerT:
        """Call a unary method on behalf of `caller`.

        Raises:
            NightshiftError: what the store raised, or that it cannot be reached.
        """
        with faults():
            return await method(request, metadata=self._metadata(caller))

    async def look_up_key(self, sha256: bytes) -> admin_pb2.LookUpKeyResponse:
        """Ask whose a key is, by its SHA-256; empty asks only whether keys are needed.

        Raises:
            NightshiftError: the store cannot be reached.
        """
        with faults():
            return await self._admin.LookUpKey(
                admin_pb2.LookUpKeyRequest(sha256=sha256), metadata=rpc.metadata(self._secret)
            )

    @contextlib.asynccontextmanager
    async def upload(self, caller: Caller) -> AsyncIterator[FileUpload]:
        """Send a file; leaving without `finish` cancels it, so that nothing stays behind."""
        async with self._opened(self._uploads.held(caller, "uploads")):
            call = self.files.UploadFile(metadata=self._metadata(caller))
            try:
                yield UploadStream(call, lambda data: files_pb2.UploadFileRequest(data=data))
            finally:
                call.cancel()

    @contextlib.asynccontextmanager
    async def upload_part(self, caller: Caller) -> AsyncIterator[PartUpload]:
        """Send a part of an upload; leaving without `finish` cancels it."""
        async with self._opened(self._uploads.held(caller, "uploads")):
            call = self.uploads.AddUploadPart(metadata=self._metadata(caller))
            try:
                yield UploadStream(call, lambda data: uploads_pb2.AddUploadPartRequest(data=data))
            finally:
                call.cancel()

    async def complete_upload(
        self, request: uploads_pb2.CompleteUploadRequest, caller: Caller
    ) -> uploads_pb2.CompleteUploadResponse:
        """Have the store make a file of an upload; takes as long as reading its content does.

        Raises:
            NightshiftError: what the store raised, or that it cannot be reached.
        """
        # Its deadline is far off, so that a store which is away is not waited for until then.
        async with self._opened(self._uploads.held(caller, "uploads")):
            return await self.call(self.uploads.CompleteUpload, request, caller)

    @contextlib.asynccontextmanager
    async def read(
        self, request: files_pb2.ReadFileRequest, caller: Caller
    ) -> AsyncIterator[FileStream]:
        """Open a download; leaving early cancels it."""
        async with self._opened(self._downloads.held(caller, "downloads")):
            call = self.files.ReadFile(request, metadata=self._metadata(caller))
            try:
                yield FileStream(call)
            finally:
                call.cancel()

    @contextlib.asynccontextmanager
    async def _opened(self, slot: contextlib.AbstractContextManager[None]) -> AsyncIterator[None]:
        """Hold a slot, and wait a moment for a store that restarts: streams have no deadline."""
        with slot:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await self._channel.channel_ready()
            except TimeoutError:
                raise _unavailable() from None
            yield

    async def is_serving(self) -> bool:
        """Tell whether the store takes work right now."""
        return await rpc.is_serving(self._channel)

    async def lacking(self) -> list[str]:
        """Return which of what the store needs it has not: its database, its blobs, or both."""
        return await rpc.lacking(self._channel, ("database", "blobs"))

    async def lacks_room_only(self) -> bool:
        """Tell whether a store that takes no work goes on with what it has, for want of disk."""
        return await rpc.is_serving(self._channel, "nightshift.v1.Work")

    def _metadata(self, caller: Caller) -> tuple[tuple[str, str], ...]:
        return rpc.metadata(
            self._secret,
            project_id=caller.project_id,
            request_id=caller.request_id,
            key_id=caller.key_id,
            idempotency_key=caller.idempotency_key,
        )
