"""What every answer has, whatever was asked and however badly."""

import asyncio
import re

import httpx2
import openai
import orjson
import pytest
from openai import AsyncOpenAI

from protos.nightshift.v1 import models_pb2
from services.gateway.main import Listening, running
from services.gateway.settings import GatewaySettings
from services.kit.wire.errors import (
    AuthenticationError,
    NightshiftError,
    RateLimitedError,
    UnavailableError,
    all_error_classes,
)
from tests.kit.eventually import eventually
from tests.kit.public_store import SECRET, ScriptedStore, batch_id, file_id

pytestmark = pytest.mark.asyncio(loop_scope="session")

REQUEST_ID = re.compile(r"req_[0-9a-f]{32}")

CASES = [
    ("POST", "/v1/x", 404, "Invalid URL (POST /v1/x)"),
    ("GET", "/", 404, "Invalid URL (GET /)"),
    ("GET", "/v1/files/a/b/c", 404, "Invalid URL (GET /v1/files/a/b/c)"),
    ("GET", "/v2/files", 404, "Invalid URL (GET /v2/files)"),
    ("BREW", "/v1/x", 400, ""),
    ("GET", "/docs/assets/none.js", 404, "Invalid URL"),
    ("GET", "/docs/assets/../../x", 404, "Invalid URL"),
    ("GET", "/docs/assets/%2e%2e/%2e%2e/__init__.py", 404, "Invalid URL"),
    ("PUT", "/v1/files", 405, "Not allowed to PUT on /v1/files."),
    ("DELETE", f"/v1/batches/{batch_id()}", 405, "Not allowed to DELETE"),
    ("GET", f"/v1/batches/{batch_id()}/cancel", 405, "Not allowed to GET"),
    ("POST", f"/v1/files/{file_id()}/content", 405, "Not allowed to POST"),
    ("POST", "/v1/models", 405, "Not allowed to POST"),
    ("OPTIONS", "/v1/files", 405, "Not allowed to OPTIONS"),
    ("TRACE", "/v1/files", 405, "Not allowed to TRACE"),
    ("POST", "/healthz", 405, "Not allowed to POST"),
    ("POST", "/docs/assets/swagger-ui.css", 405, "Not allowed to POST"),
]


@pytest.mark.parametrize(("method", "path", "status", "text"), CASES)
async def test_every_refusal_is_in_the_envelope(
    http: httpx2.AsyncClient, method: str, path: str, status: int, text: str
) -> None:
    answer = await http.request(method, path, content=b"x" * 100)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert list(answer.json()) == ["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert text in error["message"]
    assert error["code"] == ("method_not_supported" if status == 405 else None)
    assert REQUEST_ID.fullmatch(answer.headers["x-request-id"])
    assert answer.headers["content-type"] == "application/json"
    if status == 405:
        assert answer.headers["allow"]


async def test_allow_lists_all_methods_of_a_path(http: httpx2.AsyncClient) -> None:
    answer = await http.put("/v1/files")
    assert answer.headers["allow"] == "GET, HEAD, POST"
    assert "it takes GET, HEAD, POST." in answer.json()["error"]["message"]


async def test_headers_of_success(client: AsyncOpenAI, store: ScriptedStore) -> None:
    store.script("ListModels", models_pb2.ListModelsResponse())
    raw = await client.models.with_raw_response.list()
    assert REQUEST_ID.fullmatch(raw.headers["x-request-id"])
    assert raw.headers["openai-version"] == "2020-10-01"
    assert int(raw.headers["openai-processing-ms"]) >= 0
    assert "server" not in raw.headers
    assert store.calls[0].metadata["x-request-id"] == raw.headers["x-request-id"]


async def test_request_ids_differ(http: httpx2.AsyncClient) -> None:
    given = {"x-request-id": "mine"}
    answers = [await http.get("/healthz", headers=given) for _ in range(3)]
    assert len({answer.headers["x-request-id"] for answer in answers} | {"mine"}) == 4


@pytest.mark.parametrize("path", ["/v1/models", "/healthz", "/readyz", "/docs", "/openapi.yaml"])
async def test_trailing_slash_is_answered(
    http: httpx2.AsyncClient, store: ScriptedStore, path: str
) -> None:
    if path == "/v1/models":
        store.script("ListModels", *[models_pb2.ListModelsResponse()] * 2)
    plain, slashed = await http.get(path), await http.get(f"{path}/")
    assert (plain.status_code, slashed.status_code) == (200, 200)
    assert plain.content == slashed.content


@pytest.mark.parametrize("key", [None, "", "Bearer x", "Basic eDp5", "Bearer é"])
async def test_any_key_or_none_is_taken(
    http: httpx2.AsyncClient, store: ScriptedStore, key: str | None
) -> None:
    store.script("ListModels", models_pb2.ListModelsResponse())
    headers = {} if key is None else {"authorization": key.encode()}
    assert (await http.get("/v1/models", headers=headers)).status_code == 200
    assert store.calls[0].metadata["x-nightshift-project"] == "default"
    assert "authorization" not in store.calls[0].metadata


async def test_fault_of_ours_is_not_explained_to_the_client(
    http: httpx2.AsyncClient, store: ScriptedStore
) -> None:
    store.script("ListModels", ZeroDivisionError("secret detail"))
    answer = await http.get("/v1/models")
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["type"] == "server_error"
    assert "secret detail" not in answer.text


async def test_rate_limit_says_when(client: AsyncOpenAI, store: ScriptedStore) -> None:
    limited = RateLimitedError(
        "Too many requests.", code="rate_limit_exceeded", retry_after_seconds=0.05
    )
    store.script("ListModels", limited, limited, models_pb2.ListModelsResponse())
    assert [model async for model in client.models.list()] == []
    assert len(store.calls) == 3


async def test_unavailable_says_when(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    # A create is not repeated by the gateway itself, since it may have been done.
    store.script("CreateBatch", UnavailableError("Later.", retry_after_seconds=2.5))
    body = {
        "input_file_id": "f",
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    }
    answer = await http.post("/v1/batches", json=body)
    assert answer.status_code == 503
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2500")
    assert answer.json()["error"]["type"] == "server_error"
    assert len(store.calls) == 1


# The store never judges a client's key: see test_store_with_another_secret.
KINDS = [kind for kind in all_error_classes() if kind is not AuthenticationError]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_each_error_of_the_table_arrives_whole(
    http: httpx2.AsyncClient, store: ScriptedStore, kind: type[NightshiftError]
) -> None:
    error = kind("What to change.", code="some_code", param="some_param")
    store.script("DeleteFile", error)
    answer = await http.delete(f"/v1/files/{file_id()}")
    assert answer.status_code == kind.http_status
    assert answer.json() == {
        "error": {
            "message": "What to change.",
            "type": kind.type,
            "param": "some_param",
            "code": "some_code",
        }
    }
    # Of these statuses clients would ask again by themselves.
    refused_for_good = not kind.retryable and kind.http_status in (409, 500)
    assert (answer.headers.get("x-should-retry") == "false") == refused_for_good


async def send_raw(gateway: Listening, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send raw bytes and return the first answer's status, headers and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http_port)
    try:
        writer.write(data)
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode()
        first, *lines = head.strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = await reader.readexactly(int(headers["content-length"]))
        return int(first.split()[1]), headers, body
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 tls\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
        b"POST /v1/files HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"GET /" + b"a" * 200_000,
        b"GET /healthz HTTP/1.1\r\nx: " + b"a" * 200_000,
        b"GET /healthz HTTP/1.1\r\n" + b"x: y\r\n" * 50_000,
        b"POST /v1/batches HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nt: " + b"a" * 200_000,
    ],
    ids=["tls", "version", "header", "length", "url", "long", "many", "trailer"],
)
async def test_what_is_no_request(gateway: Listening, store: ScriptedStore, data: bytes) -> None:
    status, headers, body = await send_raw(gateway, data)
    assert status == 400
    assert set(orjson.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert REQUEST_ID.fullmatch(headers["x-request-id"])


async def test_upgrade_is_not_taken(gateway: Listening, store: ScriptedStore) -> None:
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    key = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    head = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
    status, _, body = await send_raw(gateway, head + upgrade + key)
    assert (status, orjson.loads(body)) == (200, {"status": "ok"})


async def test_many_requests_on_one_connection(gateway: Listening, store: ScriptedStore) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http_port)
    bad = (
        b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3000000\r\n\r\n"
        + b"x" * 3_000_000
    )
    good = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    writer.write(bad + good + good)
    statuses = []
    for _ in range(3):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        statuses.append(int(head.split()[1]))
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        await reader.readexactly(int(length[1]))
    assert statuses == [404, 200, 200]
    writer.transport.abort()


async def test_request_that_is_not_told_is_not_waited_for(
    gateway: Listening, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.rest.protocol.HEAD_SECONDS", 0.2)
    whole = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for start in (b"", b"GET /hea", whole + b"GET /hea"):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http_port)
        writer.write(start)
        try:
            got = await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.transport.abort()
        assert got.count(b"200 OK") == start.count(b"\r\n\r\n")


async def test_a_body_that_drips_is_given_up(
    gateway: Listening, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.rest.routes.resource.JSON_SECONDS", 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http_port)
    writer.write(b"POST /v1/batches HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")

    async def drip() -> None:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    try:
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    finally:
        dripping.cancel()
        writer.transport.abort()
    assert b" 400 " in answer
    assert store.calls == []


async def test_operators_pages(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    assert (await http.get("/readyz")).json() == {"status": "ready"}
    metrics = (await http.get("/metrics")).text
    assert 'nightshift_http_requests_total{method="GET",route="/readyz",status="200"}' in metrics
    page = (await http.get("/docs")).text
    links = re.findall(r'(?:src|href)="([^"]+)"', page) + re.findall(r'url: "([^"]+)"', page)
    assert len(links) == 3
    for link in links:
        assert link.startswith("/")
        assert (await http.get(link)).status_code == 200


async def test_metrics_have_bounded_labels(http: httpx2.AsyncClient) -> None:
    for number in range(3):
        await http.get(f"/v1/strange/{number}")
        await http.request("PROPFIND", f"/v1/strange/{number}")
    metrics = (await http.get("/metrics")).text
    assert "/v1/strange" not in metrics
    assert "PROPFIND" not in metrics


async def test_store_that_is_away() -> None:
    """Not ready and 503 at once for uploads; all is well again when the store is back."""
    store = ScriptedStore()
    await store.start()
    settings = GatewaySettings(
        listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", store=f"127.0.0.1:{store.port}"
    )
    async with running(settings, SECRET) as listening:
        base = f"http://127.0.0.1:{listening.http_port}"
        async with httpx2.AsyncClient(base_url=base, timeout=30) as http:
            assert (await http.get("/readyz")).status_code == 200
            await store.stop()
            answer = await http.get("/readyz")
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert (await http.get("/healthz")).status_code == 200
            official = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", http_client=http)
            sending = asyncio.create_task(official.files.create(file=("a", b"{}"), purpose="batch"))
            store.script("ListModels", models_pb2.ListModelsResponse())
            listing = asyncio.create_task(http.get("/v1/models"))
            await store.start(f"127.0.0.1:{store.port}")
            # Both were asked for while the store was away, and wait for it.
            assert (await sending).filename == "a"
            assert (await listing).status_code == 200
            await eventually(lambda: ready(http))
    await store.stop()


async def ready(http: httpx2.AsyncClient) -> bool:
    """Tell whether the gateway says that it is ready."""
    return (await http.get("/readyz")).status_code == 200


async def test_store_with_another_secret(store: ScriptedStore) -> None:
    settings = GatewaySettings(
        listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", store=f"127.0.0.1:{store.port}"
    )
    async with (
        running(settings, "another") as listening,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{listening.http_port}") as http,
    ):
        answer = await http.get("/v1/models")
        # The client's key is not to blame, so that it must not read 401.
        assert answer.status_code == 500
        assert "secret" not in answer.text
