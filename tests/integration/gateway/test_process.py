"""The gateway as a process of its own, before the real store."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import httpx2
import openai
import pytest
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)

from protos.nightshift.v1 import admin_pb2, files_pb2, files_pb2_grpc
from services.cli.shared import admin_calls
from services.cli.shared.ports import is_open
from services.cli.up.fleet import StoreAt
from services.cli.up.plan import Address
from services.kit.calls import rpc
from tests.kit.eventually import eventually
from tests.kit.ports import free_port
from tests.kit.store import StoreProcess, client_of, store_process

pytestmark = pytest.mark.slow

SECRET_FILE = "NIGHTSHIFT_SECRET_FILE"


class GatewayProcess:
    """A gateway on ports of its own; its log is in a file."""

    def __init__(self, folder: Path, store: str, secret: Path, **environment: str) -> None:
        self.http_port, self.grpc_port = free_port(), free_port()
        self.base = f"http://127.0.0.1:{self.http_port}"
        self.log = folder / "gateway.log"
        self.output = folder / "gateway.out"
        with self.log.open("wb") as log, self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.gateway.main"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                env={
                    **os.environ,
                    "NIGHTSHIFT_GATEWAY_LISTEN": f"127.0.0.1:{self.http_port}",
                    "NIGHTSHIFT_GATEWAY_GRPC_LISTEN": f"127.0.0.1:{self.grpc_port}",
                    "NIGHTSHIFT_GATEWAY_STORE": store,
                    SECRET_FILE: str(secret),
                    **environment,
                },
            )

    async def ready(self) -> None:
        """Wait until batches can be taken."""
        async with httpx2.AsyncClient() as http:

            async def check() -> bool:
                assert self.process.poll() is None, self.log.read_text()
                try:
                    return (await http.get(f"{self.base}/readyz")).status_code == 200
                except httpx2.TransportError:
                    return False

            await eventually(check, within_seconds=20, every_seconds=0.05)

    def stop(self) -> int:
        """Ask it to stop and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A real store."""
    process = StoreProcess(tmp_path_factory.mktemp("store"))
    process.start()
    yield process
    process.kill()


@pytest.fixture
async def gateway(store: StoreProcess, tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    """A gateway before it."""
    process = await started(store, tmp_path)
    yield process
    if process.process.poll() is None:
        process.process.kill()
        process.process.wait()


async def started(store: StoreProcess, folder: Path, **environment: str) -> GatewayProcess:
    """Return a gateway that is ready."""
    secret = store.data / "secret"
    await eventually(secret.exists, within_seconds=20)
    process = GatewayProcess(folder, store.address, secret, **environment)
    await process.ready()
    return process


async def test_round_trip_and_clean_stop(gateway: GatewayProcess) -> None:
    content = b'{"custom_id":"a","method":"POST","url":"/v1/embeddings","body":{"model":"m"}}\n'
    async with openai.AsyncOpenAI(base_url=f"{gateway.base}/v1", api_key="x") as client:
        file = await client.files.create(file=("é", content * 9), purpose="batch")
        assert (await client.files.content(file.id)).content == content * 9
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        assert [one.id async for one in client.batches.list()] == [batch.id]

        async def failed() -> bool:
            return (await client.batches.retrieve(batch.id)).status == "failed"

        await eventually(failed)
        with pytest.raises(openai.ConflictError, match="status 'failed'"):
            await client.batches.cancel(batch.id)
        await client.files.delete(file.id)
        assert [one.id async for one in client.files.list()] == []
    assert gateway.stop() == 0
    assert gateway.output.read_text() == ""
    log = gateway.log.read_text()
    assert "Traceback" not in log
    assert "custom_id" not in log


async def test_stop_lets_an_upload_end(gateway: GatewayProcess) -> None:
    reading, content = threading.Event(), b"{}\n" * 100_000

    class Slow:
        """A file whose second half is not to be had yet."""

        def __init__(self) -> None:
            self.place = 0

        def read(self, size: int = -1) -> bytes:
            if self.place > len(content) // 2:
                reading.wait(20)
            end = len(content) if size < 0 else self.place + size
            piece = content[self.place : end]
            self.place += len(piece)
            return piece

    def pieces() -> Iterator[bytes]:
        slow = Slow()
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        while piece := slow.read(65536):
            yield piece
        yield b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'

    def send() -> httpx2.Response:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        return httpx2.post(
            f"{gateway.base}/v1/files", content=pieces(), headers=headers, timeout=30
        )

    async def uploading() -> bool:
        async with httpx2.AsyncClient() as http:
            text = (await http.get(f"{gateway.base}/metrics")).text
        return any(
            line.startswith("nightshift_upload_bytes_total ") and float(line.split()[1]) > 100_000
            for line in text.splitlines()
        )

    with futures.ThreadPoolExecutor() as threads:
        sending = threads.submit(send)
        await eventually(uploading)
        gateway.process.send_signal(signal.SIGTERM)
        await eventually(lambda: "Shutting down" in gateway.log.read_text())
        # The other door does not wait for this one.
        await eventually(lambda: not is_open(Address("127.0.0.1", gateway.grpc_port)))
        reading.set()
        assert sending.result(20).json()["bytes"] == len(content)
    assert gateway.process.wait(20) == 0


REFUSED = {
    "unknown": ({"NIGHTSHIFT_GATEWAY_LISTNE": "x"}, "unknown setting"),
    "no secret": ({SECRET_FILE: "none"}, SECRET_FILE),
}


@pytest.mark.parametrize("case", [*REFUSED, "taken", "taken grpc"])
def test_start_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        takes = {
            "taken": "NIGHTSHIFT_GATEWAY_LISTEN",
            "taken grpc": "NIGHTSHIFT_GATEWAY_GRPC_LISTEN",
        }
        name = takes.get(case, "")
        environment, text = REFUSED.get(case, ({name: address}, name))
        process = GatewayProcess(tmp_path, f"127.0.0.1:{free_port()}", secret, **environment)
        assert process.process.wait(20) == 2, process.log.read_text()
    lines = [line for line in process.log.read_text().splitlines() if not line.startswith("{")]
    own = [line for line in lines if line.startswith("nightshift gateway: ")]
    assert len(own) == 1
    assert text in own[0]
    assert "Traceback" not in process.log.read_text()
    assert process.output.read_text() == ""


OPEN = {"NIGHTSHIFT_GATEWAY_LISTEN": "0.0.0.0:0"}


async def test_an_open_address_is_refused_until_there_is_a_key(tmp_path: Path) -> None:
    """It waits for a store that is away, which alone knows, and can be stopped meanwhile."""
    store = StoreProcess(tmp_path / "store")
    secret = tmp_path / "store" / "secret"
    secret.parent.mkdir()
    secret.write_text("s" * 64)
    process = GatewayProcess(tmp_path, store.address, secret, **OPEN)
    store.start()
    try:
        assert process.process.wait(30) == 2, process.log.read_text()
        said = [line for line in process.log.read_text().splitlines() if not line.startswith("{")]
        assert len(said) == 1
        for what in (
            "NIGHTSHIFT_GATEWAY_LISTEN is 0.0.0.0:0",
            f"nightshift keys create --project P --store {store.address}",
            "NIGHTSHIFT_GATEWAY_ALLOW_OPEN=true",
        ):
            assert what in said[0]
        async with client_of(store) as client:
            await client.admin.CreateKey(
                admin_pb2.CreateKeyRequest(project_id="p"), metadata=client.metadata
            )
        second = GatewayProcess(tmp_path, store.address, secret, **OPEN)
        await eventually(lambda: '"listening"' in second.log.read_text(), within_seconds=20)
        assert second.stop() == 0
    finally:
        store.kill()
    away = GatewayProcess(tmp_path, store.address, secret, **OPEN)
    await eventually(lambda: '"store_is_away"' in away.log.read_text(), within_seconds=20)
    assert away.stop() == 0


async def test_who_did_what_is_logged(tmp_path: Path) -> None:
    with store_process(tmp_path / "store") as store:
        gateway = await started(store, tmp_path)
        there = StoreAt(store.address, (store.data / "secret").read_text().strip())
        made = await admin_calls.create_key(there, admin_pb2.CreateKeyRequest(project_id="p"))
        good, key_id = {"authorization": f"Bearer {made.secret}"}, made.key.id
        async with (
            httpx2.AsyncClient(base_url=gateway.base, headers=good) as http,
            rpc.open_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
        ):
            form = {"file": ("a.jsonl", b"{}\n"), "purpose": (None, "batch")}
            file = (await http.post("/v1/files", files=form)).json()
            assert (await http.delete(f"/v1/files/{file['id']}")).status_code == 200
            files = files_pb2_grpc.FilesStub(channel)
            await files.ListFiles(files_pb2.ListFilesRequest(), metadata=tuple(good.items()))
            wrong = {"authorization": f"Bearer {made.secret[:-1]}"}
            assert (await http.get("/v1/files", headers=wrong)).status_code == 401
            metrics = (await http.get("/metrics")).text
        assert f'nightshift_key_requests_total{{key="{key_id}"}} 3.0' in metrics
        assert f'nightshift_key_requests_running{{key="{key_id}"}} 0.0' in metrics
        assert 'nightshift_refused_keys_total{reason="malformed"} 1.0' in metrics
        await admin_calls.revoke_key(there, key_id, "")
        assert gateway.stop() == 0
        logs = gateway.log.read_text(), store.log()
    assert not [log for log in logs if made.secret[4:-6] in log]
    door, kept = ([json.loads(line) for line in log.splitlines()] for log in logs)
    requests = [line for line in door if line["event"] == "request" and line.get("key")]
    assert [(line["method"], line.get("status"), line.get("code")) for line in requests] == [
        ("POST", 200, None),
        ("DELETE", 200, None),
        ("/nightshift.v1.Files/ListFiles", None, "OK"),
    ]
    for line in requests:
        assert (line["project"], line["key"], line["client"]) == ("p", key_id, "127.0.0.1")
    (refused,) = (line for line in door if line["event"] == "keys_refused")
    assert (refused["count"], refused["last_client"]) == (1, "127.0.0.1")
    (deleted,) = (line for line in kept if line["event"] == "file_deleted")
    assert (deleted["file"], deleted["project"], deleted["key"]) == (file["id"], "p", key_id)
    assert deleted["request_id"] == requests[1]["request_id"]
    for event, field in (("key_made", "made"), ("key_revoked", "revoked")):
        (line,) = (line for line in kept if line["event"] == event)
        assert (line[field], line["of_project"]) == (key_id, "p")
        assert line["operator"].endswith(f"@{socket.gethostname()}")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector of traces that only remembers."""

    def __init__(self) -> None:
        self.spans: list[str] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [f"{span.trace_id.hex()} {span.name}" for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_traces_go_on_from_the_client(store: StoreProcess, tmp_path: Path) -> None:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    gateway = await started(
        store,
        tmp_path,
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}",
        OTEL_BSP_SCHEDULE_DELAY="50",
    )
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with httpx2.AsyncClient(base_url=gateway.base) as http:
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        call = channel.unary_unary("/nightshift.v1.Models/ListModels")
        await call(b"", metadata=(("traceparent", headers["traceparent"]),))
    assert gateway.stop() == 0
    server.stop(None)
    mine = [span.split(" ", 1)[1] for span in collector.spans if span.startswith(trace_id)]
    assert any("GET" in name for name in mine), collector.spans
    assert any("Models/ListModels" in name for name in mine), collector.spans
