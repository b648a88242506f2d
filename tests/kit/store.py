"""The store as a real process, spoken to over its gRPC door."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import grpc
import orjson
import pytest

from protos.nightshift.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    batches_pb2,
    batches_pb2_grpc,
    events_pb2_grpc,
    files_pb2,
    files_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    uploads_pb2_grpc,
    work_pb2_grpc,
)
from services.kit.calls import rpc
from services.kit.wire import ids
from services.kit.wire.errors import NightshiftError, from_rpc_error
from tests.kit.eventually import eventually
from tests.kit.ports import free_address
from tests.kit.streams import told

DAY_SECONDS = 86_400
START_SECONDS = 60.0
"""How long a store may take to start on a busy machine."""
_NOT_YET = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
MODEL = "simulated"
POOL = ids.pool_id_of(MODEL)


class StoreProcess:
    """A store on `data`; may be killed and started again on the same address."""

    def __init__(self, data: Path, environment: dict[str, str] | None = None) -> None:
        self.data = data
        self.address = free_address()
        self.environment = environment or {}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; `Client.ready` waits for it."""
        self.data.mkdir(parents=True, exist_ok=True)
        with (self.data / "store.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.store.main"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "NIGHTSHIFT_STORE_DATA_DIR": str(self.data),
                    "NIGHTSHIFT_STORE_LISTEN": self.address,
                    **self.environment,
                },
            )

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self, within_seconds: float = 20.0) -> int:
        """SIGTERM; returns the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_seconds)

    def log(self) -> str:
        """All that it logged."""
        return (self.data / "store.log").read_text()

    def blobs(self) -> list[Path]:
        """Every file in its blob directory, half-written ones included."""
        return sorted(path for path in (self.data / "blobs").rglob("*") if path.is_file())


class Client:
    """What a gateway does, with errors as our own."""

    def __init__(self, store: StoreProcess, project_id: str = ids.DEFAULT_PROJECT) -> None:
        self.store = store
        self.project_id = project_id
        self.channel = rpc.open_channel(store.address)
        self.files = files_pb2_grpc.FilesStub(self.channel)
        self.uploads = uploads_pb2_grpc.UploadsStub(self.channel)
        self.batches = batches_pb2_grpc.BatchesStub(self.channel)
        self.events = events_pb2_grpc.EventsStub(self.channel)
        self.models = models_pb2_grpc.ModelsStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        self.work = work_pb2_grpc.WorkStub(self.channel)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        secret = (self.store.data / "secret").read_text().strip()
        return rpc.metadata(secret, project_id=self.project_id)

    async def ready(self) -> None:
        """Wait until it answers, and give it a model."""
        await eventually((self.store.data / "secret").exists, within_seconds=START_SECONDS)

        async def answered() -> bool:
            try:
                await self.admin.PutModels(
                    admin_pb2.PutModelsRequest(models=[models_pb2.Model(id=MODEL, pool_id=POOL)]),
                    metadata=self.metadata,
                )
            except grpc.aio.AioRpcError as failure:
                if failure.code() not in _NOT_YET:
                    raise
                return False
            return True

        await eventually(answered, within_seconds=START_SECONDS)

    async def upload(
        self,
        content: bytes,
        *,
        purpose: str | None = "batch",
        filename: str = "input.jsonl",
        expires_after: files_pb2.ExpiresAfter | None = None,
        frame_bytes: int = 1 << 20,
    ) -> files_pb2.File:
        """Upload a file, purpose last, as a streaming client does."""

        def frames() -> Iterable[files_pb2.UploadFileRequest]:
            yield files_pb2.UploadFileRequest(header=files_pb2.UploadFileHeader(filename=filename))
            for start in range(0, len(content), frame_bytes):
                yield files_pb2.UploadFileRequest(data=content[start : start + frame_bytes])
            yield files_pb2.UploadFileRequest(
                footer=files_pb2.UploadFileFooter(purpose=purpose, expires_after=expires_after)
            )

        with our_errors():
            answer = await told(self.files.UploadFile(frames(), metadata=self.metadata))
        file: files_pb2.File = answer.file
        return file

    async def download(self, file_id: str) -> bytes:
        """Return a file's content."""
        with our_errors():
            answers = self.files.ReadFile(
                files_pb2.ReadFileRequest(file_id=file_id), metadata=self.metadata
            )
            return b"".join([answer.data async for answer in answers])

    async def create(self, file_id: str, *, window_seconds: int = DAY_SECONDS) -> batches_pb2.Batch:
        """Create a batch of chat completions."""
        with our_errors():
            answer = await self.batches.CreateBatch(
                batches_pb2.CreateBatchRequest(
                    input_file_id=file_id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                    completion_window_seconds=window_seconds,
                ),
                metadata=self.metadata,
            )
        return answer.batch

    async def get(self, batch_id: str) -> batches_pb2.Batch:
        """Read a batch."""
        with our_errors():
            answer = await self.batches.GetBatch(
                batches_pb2.GetBatchRequest(batch_id=batch_id), metadata=self.metadata
            )
        return answer.batch

    async def settled(self, batch_id: str, status: int) -> batches_pb2.Batch:
        """Wait until a batch has `status`."""

        async def there() -> batches_pb2.Batch | None:
            batch = await self.get(batch_id)
            return batch if batch.status == status else None

        found = await eventually(there)
        assert found is not None
        return found


@contextlib.contextmanager
def our_errors() -> Iterator[None]:
    """Raise what the other side raised, rather than gRPC's wrapping of it."""
    try:
        yield
    except grpc.aio.AioRpcError as failure:
        raise from_rpc_error(failure) from failure


@contextlib.contextmanager
def store_process(data: Path, environment: dict[str, str] | None = None) -> Iterator[StoreProcess]:
    """Start a store and stop it again; for a module of tests to share."""
    store = StoreProcess(data, environment)
    store.start()
    try:
        yield store
    finally:
        store.stop()


@contextlib.asynccontextmanager
async def client_of(store: StoreProcess) -> AsyncIterator[Client]:
    """Connect to a store that runs, waiting until it answers."""
    client = Client(store)
    try:
        await client.ready()
        yield client
    finally:
        await client.channel.close()


@contextlib.asynccontextmanager
async def running_store(
    data: Path, environment: dict[str, str] | None = None
) -> AsyncIterator[Client]:
    """Start a store for one test and stop it again."""
    with store_process(data, environment) as store:
        async with client_of(store) as client:
            yield client


def chat_line(custom_id: str, content: str = "hello", **body: object) -> bytes:
    """Return one request line, line end included."""
    return (
        orjson.dumps(
            {
                "custom_id": custom_id,
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": MODEL,
                    "messages": [{"role": "user", "content": content}],
                    **body,
                },
            }
        )
        + b"\n"
    )


def refused(error: pytest.ExceptionInfo[NightshiftError]) -> tuple[int, str | None, str | None]:
    """Return what of an error clients match on: status, code, param."""
    return error.value.http_status, error.value.code, error.value.param
