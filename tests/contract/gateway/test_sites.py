"""Without keys, no browser may use the server for a page of elsewhere; programs go on working."""

import httpx2
import pytest

from protos.nightshift.v1 import batches_pb2, models_pb2
from services.gateway.main import Listening, running
from services.gateway.settings import GatewaySettings
from tests.kit.public_store import SECRET, ScriptedStore, make_batch

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

BODY = b'{"input_file_id": "f", "endpoint": "/v1/embeddings", "completion_window": "24h"}'
JSON = "application/json"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        # A name that its owner had lead here: to the browser, the page and the server are one.
        ({"host": "evil.example:PORT", "origin": "http://evil.example:PORT"}, "host_not_allowed"),
        ({"host": "evil.example"}, "host_not_allowed"),
        ({"host": "localhost.evil.example:PORT"}, "host_not_allowed"),
        ({"host": "1.2.3.4.evil.example"}, "host_not_allowed"),
        ({"host": "evil.example:a"}, "host_not_allowed"),
        # A browser that says where a page is from, and one that does not.
        ({"sec-fetch-site": "cross-site"}, "origin_not_allowed"),
        ({"sec-fetch-site": "same-site"}, "origin_not_allowed"),
        ({"origin": "https://evil.example"}, "origin_not_allowed"),
        ({"origin": "null"}, "origin_not_allowed"),
        ({"origin": "http://127.0.0.1:1"}, "origin_not_allowed"),
        ({"origin": "http://127.0.0.1"}, "origin_not_allowed"),
        ({"origin": "http://localhost:PORT"}, "origin_not_allowed"),
        ({"origin": "http://["}, "origin_not_allowed"),
    ],
)
async def test_a_page_of_elsewhere_is_refused(
    gateway: Listening,
    http: httpx2.AsyncClient,
    store: ScriptedStore,
    headers: dict[str, str],
    code: str,
) -> None:
    sent = {name: text.replace("PORT", str(gateway.http_port)) for name, text in headers.items()}
    created = await http.post("/v1/batches", content=BODY, headers={"content-type": JSON, **sent})
    for answer in (created, await http.get("/metrics", headers=sent)):
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == code
        assert "nightshift keys create" in answer.json()["error"]["message"]
    assert store.calls == []
    # A link to the documentation may stand anywhere.
    assert (await http.get("/docs", headers=sent)).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_page_declares_its_json(
    gateway: Listening, http: httpx2.AsyncClient, store: ScriptedStore, kind: str
) -> None:
    headers = {"content-type": kind, "origin": f"http://127.0.0.1:{gateway.http_port}"}
    answer = await http.post("/v1/batches", content=BODY, headers=headers)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]
    assert store.calls == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "application/x-www-form-urlencoded"},  # what curl -d sends
        {"host": "localhost:PORT"},
        {"host": "[::1]:PORT"},
        {"host": "[::1]"},
        {"host": "LOCALHOST"},
        {"host": "192.168.1.7:8000"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:PORT"},
        {"host": "localhost", "origin": "http://localhost"},
        # Behind what ends TLS.
        {"host": "10.0.0.1", "origin": "https://10.0.0.1"},
    ],
)
async def test_programs_and_its_own_page_are_served(
    gateway: Listening, http: httpx2.AsyncClient, store: ScriptedStore, headers: dict[str, str]
) -> None:
    store.script("CreateBatch", batches_pb2.CreateBatchResponse(batch=make_batch()))
    port = str(gateway.http_port)
    sent = {name: text.replace("PORT", port) for name, text in headers.items()}
    answer = await http.post("/v1/batches", content=BODY, headers={"content-type": JSON, **sent})
    assert answer.status_code == 200, answer.text


async def test_names_are_allowed_and_metrics_are_for_this_machine(
    store: ScriptedStore,
) -> None:
    settings = GatewaySettings(
        listen="localhost:0",
        grpc_listen="127.0.0.1:0",
        store=f"127.0.0.1:{store.port}",
        allowed_hosts="gateway, gpu1.example",
    )
    async with running(settings, SECRET) as listening:
        base = f"http://localhost:{listening.http_port}"
        async with httpx2.AsyncClient(base_url=base, timeout=20) as client:
            statuses = {}
            for host in ("localhost:1", "gateway:8000", "GPU1.example", "gateway.example"):
                if host != "gateway.example":
                    store.script("ListModels", models_pb2.ListModelsResponse())
                answer = await client.get("/v1/models", headers={"host": host})
                statuses[host] = answer.status_code
            assert list(statuses.values()) == [200, 200, 200, 403]
            # As a proxy on this machine names a client of elsewhere.
            afar = {"x-forwarded-for": "203.0.113.9"}
            assert (await client.get("/metrics", headers=afar)).status_code == 200
    store.keys_needed = True
    async with running(settings, SECRET) as listening:
        base = f"http://localhost:{listening.http_port}"
        async with httpx2.AsyncClient(base_url=base, timeout=20) as client:
            assert (await client.get("/metrics")).status_code == 200
            refused = await client.get("/metrics", headers=afar)
            assert refused.status_code == 403
            assert "NIGHTSHIFT_GATEWAY_METRICS_LISTEN" in refused.json()["error"]["message"]
