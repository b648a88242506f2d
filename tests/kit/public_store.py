"""A scripted store: a true gRPC server of `Files`, `Batches` and `Models` that logs every call.

It answers what a test tells it to, once each and in order; uploads and contents have defaults. It
decides nothing that the real store decides.
"""

import asyncio
import hashlib
import inspect
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.nightshift.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    batches_pb2,
    batches_pb2_grpc,
    events_pb2_grpc,
    files_pb2,
    files_pb2_grpc,
    models_pb2_grpc,
)
from services.kit.calls import interceptors, rpc
from services.kit.wire.errors import NightshiftError, NotFoundError

SECRET = "s" * 64
CREATED_AT = 1_700_000_000
DAY_SECONDS = 86_400

Answer = Any  # a message, an error to raise, or a function (also async) from request to message


@dataclass
class LoggedCall:
    """One call as it arrived."""

    method: str
    request: Any
    metadata: dict[str, str]


@dataclass
class LoggedUpload:
    """One upload as it arrived."""

    metadata: dict[str, str]
    header: files_pb2.UploadFileHeader | None = None
    frames: list[int] = field(default_factory=list)
    content: bytearray = field(default_factory=bytearray)
    footer: files_pb2.UploadFileFooter | None = None
    outcome: str = "open"


@dataclass
class LoggedRead:
    """One download, open until its call ends in whatever way."""

    open: bool = True

    def end(self) -> None:
        """Note its end."""
        self.open = False


@dataclass
class ScriptedStore:
    """What the store is to answer, and what it was asked."""

    port: int = 0
    calls: list[LoggedCall] = field(default_factory=list)
    uploads: list[LoggedUpload] = field(default_factory=list)
    files: dict[str, tuple[files_pb2.File, bytes]] = field(default_factory=dict)
    reads: list[LoggedRead] = field(default_factory=list)
    frame_bytes: int = 64 * 1024
    keep_content: bool = True
    refuse_upload_after: tuple[int, NightshiftError] | None = None
    break_read_after: int | None = None
    read_gate: asyncio.Event | None = None
    on_frame: Callable[[int], None] | None = None
    keys: dict[bytes, admin_pb2.ApiKey] = field(default_factory=dict)
    keys_needed: bool = False
    all_have_checksums: bool = False
    key_lookups: list[bytes] = field(default_factory=list)
    running: rpc.RunningServer | None = None
    _script: dict[str, deque[Answer]] = field(default_factory=lambda: defaultdict(deque))

    def forget(self) -> None:
        """Go back to having heard and being told nothing."""
        fresh = ScriptedStore(port=self.port, running=self.running)
        self.__dict__.update(fresh.__dict__)

    def script(self, method: str, *answers: Answer) -> None:
        """Answer the next calls of `method` so."""
        self._script[method].extend(answers)

    def add_file(self, content: bytes, **fields: Any) -> files_pb2.File:
        """Hold a file that can be read."""
        file = make_file(bytes=len(content), **fields)
        self.files[file.id] = (file, content)
        return file

    def add_key(self, secret: str, **fields: Any) -> admin_pb2.ApiKey:
        """Know an API key, so that one is needed from now on."""
        values = {"id": f"key_{len(self.keys):032x}", "project_id": "default", **fields}
        key = self.keys[hashlib.sha256(secret.encode()).digest()] = admin_pb2.ApiKey(**values)
        self.keys_needed = True
        return key

    def reads_open(self) -> int:
        """Return how many downloads are in progress."""
        return sum(read.open for read in self.reads)

    def left(self) -> dict[str, int]:
        """Return how many scripted answers nobody asked for."""
        return {name: len(answers) for name, answers in self._script.items() if answers}

    def requests(self, method: str) -> list[Any]:
        """Return the requests of `method`, in order."""
        return [call.request for call in self.calls if call.method == method]

    def answer(self, method: str, request: Any, context: Any) -> Any:
        """Log a call and return what was scripted for it.

        Raises:
            NightshiftError: scripted so.
        """
        metadata = dict(context.invocation_metadata())
        self.calls.append(LoggedCall(method, request, metadata))
        scripted = self._script[method]
        if not scripted:
            raise NotFoundError(f"nothing is scripted for {method}")
        answer: Answer = scripted.popleft()
        if isinstance(answer, BaseException):
            raise answer
        return answer(request) if isinstance(answer, Callable) else answer

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        """Listen."""
        servicer = _Servicer(self)
        entries = [
            rpc.ServiceEntry(f"nightshift.v1.{name}", servicer, add)
            for name, add in (
                ("Files", files_pb2_grpc.add_FilesServicer_to_server),
                ("Batches", batches_pb2_grpc.add_BatchesServicer_to_server),
                ("Events", events_pb2_grpc.add_EventsServicer_to_server),
                ("Models", models_pb2_grpc.add_ModelsServicer_to_server),
                ("Admin", admin_pb2_grpc.add_AdminServicer_to_server),
            )
        ]
        around = [interceptors.SecretInterceptor(SECRET), interceptors.ErrorsInterceptor()]
        self.running = await rpc.start_server(listen, entries, around)
        self.port = self.running.port

    async def stop(self) -> None:
        """Go away, as a killed store does."""
        if self.running is not None:
            await self.running.server.stop(0)
            self.running = None


class _Servicer(
    admin_pb2_grpc.AdminServicer,
    files_pb2_grpc.FilesServicer,
    batches_pb2_grpc.BatchesServicer,
    events_pb2_grpc.EventsServicer,
    models_pb2_grpc.ModelsServicer,
):
    def __init__(self, store: ScriptedStore) -> None:
        self._store = store

    async def LookUpKey(
        self, request: admin_pb2.LookUpKeyRequest, context: Any
    ) -> admin_pb2.LookUpKeyResponse:
        store = self._store
        store.key_lookups.append(request.sha256)
        return admin_pb2.LookUpKeyResponse(
            keys_needed=store.keys_needed,
            key=store.keys.get(request.sha256),
            all_have_checksums=store.all_have_checksums,
        )

    async def UploadFile(
        self, request_iterator: AsyncIterator[files_pb2.UploadFileRequest], context: Any
    ) -> files_pb2.UploadFileResponse:
        store = self._store
        upload = LoggedUpload(dict(context.invocation_metadata()))
        store.uploads.append(upload)
        try:
            async for request in request_iterator:
                self._take(upload, request)
        except asyncio.CancelledError:
            upload.outcome = "cancelled"
            raise
        except NightshiftError:
            upload.outcome = "refused"
            raise
        if upload.footer is None:
            upload.outcome = "broken off"
            raise NotFoundError("no footer")
        upload.outcome = "finished"
        assert upload.header is not None
        file = make_file(
            bytes=sum(upload.frames),
            filename=upload.header.filename,
            purpose=upload.footer.purpose,
        )
        if upload.footer.HasField("expires_after"):
            file.expires_at = CREATED_AT + upload.footer.expires_after.seconds
        store.files[file.id] = (file, bytes(upload.content))
        return files_pb2.UploadFileResponse(file=file)

    def _take(self, upload: LoggedUpload, request: files_pb2.UploadFileRequest) -> None:
        match request.WhichOneof("frame"):
            case "header":
                upload.header = request.header
            case "data":
                upload.frames.append(len(request.data))
                if self._store.keep_content:
                    upload.content += request.data
            case "footer":
                upload.footer = request.footer
        refusal = self._store.refuse_upload_after
        if refusal is not None and len(upload.frames) >= refusal[0]:
            raise refusal[1]

    async def ReadFile(
        self, request: files_pb2.ReadFileRequest, context: Any
    ) -> AsyncIterator[files_pb2.ReadFileResponse]:
        store = self._store
        store.calls.append(LoggedCall("ReadFile", request, dict(context.invocation_metadata())))
        if request.file_id not in store.files:
            raise NotFoundError(f"No such File object: {request.file_id}", param="id")
        read = LoggedRead()
        store.reads.append(read)
        context.add_done_callback(lambda _: read.end())
        file, content = store.files[request.file_id]
        end = request.offset + request.length if request.HasField("length") else len(content)
        wanted = content[request.offset : end]
        yield files_pb2.ReadFileResponse(file=file)
        for start in range(0, len(wanted), store.frame_bytes):
            if store.break_read_after is not None and start >= store.break_read_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            if store.read_gate is not None and start:
                await store.read_gate.wait()
            if store.on_frame is not None:
                store.on_frame(store.frame_bytes)
            yield files_pb2.ReadFileResponse(data=wanted[start : start + store.frame_bytes])


def _scripted(method: str) -> Callable[..., Any]:
    async def handler(self: _Servicer, request: Any, context: Any) -> Any:
        store = self._store
        if method == "GetFile" and request.file_id in store.files:
            store.calls.append(LoggedCall(method, request, dict(context.invocation_metadata())))
            return files_pb2.GetFileResponse(file=store.files[request.file_id][0])
        answer = store.answer(method, request, context)
        return await answer if inspect.isawaitable(answer) else answer

    return handler


for _name in (
    "GetFile",
    "ListFiles",
    "DeleteFile",
    "CreateBatch",
    "GetBatch",
    "ListBatches",
    "CancelBatch",
    "GetUsage",
    "ReadBatchEvents",
    "ListModels",
    "GetModel",
):
    setattr(_Servicer, _name, _scripted(_name))


def file_id(number: int = 1) -> str:
    """Return a well-formed file id."""
    return f"file-{number:032x}"


def batch_id(number: int = 1) -> str:
    """Return a well-formed batch id."""
    return f"batch_{number:032x}"


def make_file(number: int = 1, **fields: Any) -> files_pb2.File:
    """Return a file as the store would describe it."""
    values: dict[str, Any] = {
        "id": file_id(number),
        "bytes": 5,
        "created_at": CREATED_AT,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    return files_pb2.File(**{**values, **fields})


def make_batch(number: int = 1, **fields: Any) -> batches_pb2.Batch:
    """Return a batch as the store would describe it, fresh unless `fields` say otherwise."""
    values: dict[str, Any] = {
        "id": batch_id(number),
        "endpoint": "/v1/chat/completions",
        "input_file_id": file_id(),
        "completion_window": "24h",
        "status": batches_pb2.BATCH_STATUS_VALIDATING,
        "created_at": CREATED_AT,
        "expires_at": CREATED_AT + DAY_SECONDS,
        "request_counts": batches_pb2.RequestCounts(),
    }
    return batches_pb2.Batch(**{**values, **fields})
