"""Keys, limits and idempotency keys at both doors, before a scripted store."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx2
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from protos.nightshift.v1 import (
    batches_pb2,
    batches_pb2_grpc,
    files_pb2,
    files_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)
from services.gateway.main import Listening, running
from services.gateway.settings import GatewaySettings
from services.kit.calls import rpc
from services.kit.wire.api_keys import new_key
from services.kit.wire.errors import (
    AuthenticationError,
    InvalidRequestError,
    NightshiftError,
    RateLimitedError,
    from_rpc_error,
)
from tests.kit.public_store import SECRET, ScriptedStore, make_batch
from tests.kit.streams import told

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

KEY, LIMITED, OFTEN, WRONG, BY_GRPC = (new_key(bytes([n] * 32)) for n in range(5))
BATCH = {"input_file_id": "f", "endpoint": "/v1/embeddings", "completion_window": "24h"}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def one_locked() -> AsyncIterator[tuple[ScriptedStore, Listening]]:
    """A gateway of its own before a store that has keys: the other's knows none."""
    store = ScriptedStore()
    store.add_key(KEY, project_id="a", id="key_a")
    store.add_key(LIMITED, project_id="a", id="key_limited", requests_per_minute=2)
    # One request every two seconds: soon enough to wait for it.
    store.add_key(OFTEN, project_id="a", id="key_often", requests_per_minute=30)
    await store.start()
    settings = GatewaySettings(
        listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", store=f"127.0.0.1:{store.port}"
    )
    async with running(settings, SECRET) as listening:
        yield store, listening
    await store.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def locked(one_locked: tuple[ScriptedStore, Listening]) -> AsyncIterator[ScriptedStore]:
    """That store, with nothing scripted but its keys."""
    store, _ = one_locked
    keys = store.keys
    store.forget()
    store.keys, store.keys_needed = keys, True
    yield store
    assert store.left() == {}


@pytest_asyncio.fixture(loop_scope="session")
async def http(
    one_locked: tuple[ScriptedStore, Listening], locked: ScriptedStore
) -> AsyncIterator[httpx2.AsyncClient]:
    """A plain client."""
    base = f"http://127.0.0.1:{one_locked[1].http_port}"
    async with httpx2.AsyncClient(base_url=base, timeout=20) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def channel(
    one_locked: tuple[ScriptedStore, Listening], locked: ScriptedStore
) -> AsyncIterator[grpc.aio.Channel]:
    """A gRPC client's channel."""
    async with rpc.open_channel(f"127.0.0.1:{one_locked[1].grpc_port}") as opened:
        yield opened


def bearer(key: str) -> dict[str, str]:
    """Return the header that shows a key."""
    return {"authorization": f"Bearer {key}"}


def official(http: httpx2.AsyncClient, key: str) -> AsyncOpenAI:
    """Return the official client with a key."""
    return AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=key, http_client=http)


async def refusal(call: Any) -> NightshiftError:
    """Return what a gRPC call is refused with."""
    with pytest.raises(rpc.CallFault) as caught:
        await call
    return from_rpc_error(caught.value)


# contract: 97
@pytest.mark.parametrize("shown", [None, "", "Bearer", "Basic eDp5"])
async def test_no_key_is_told_to_bring_one(
    http: httpx2.AsyncClient, locked: ScriptedStore, shown: str | None
) -> None:
    headers = {} if shown is None else {"authorization": shown}
    answer = await http.get("/v1/models", headers=headers)
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert error["message"].startswith("You didn't provide an API key.")
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", None, None)
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"].startswith("req_")
    assert locked.calls == []


# contract: 97
async def test_a_wrong_key_is_named_and_not_echoed_whole(
    http: httpx2.AsyncClient, locked: ScriptedStore
) -> None:
    client = official(http, WRONG)
    with pytest.raises(openai.AuthenticationError) as refused:
        await client.models.list()
    assert refused.value.code == "invalid_api_key"
    assert refused.value.message.count(WRONG) == 0
    body = refused.value.body
    assert isinstance(body, dict)
    assert body["message"].startswith(f"Incorrect API key provided: nsk********{WRONG[-4:]}.")
    assert locked.calls == []


# contract: 97
async def test_a_good_key_is_its_project(http: httpx2.AsyncClient, locked: ScriptedStore) -> None:
    locked.script("ListModels", models_pb2.ListModelsResponse())
    locked.script("CreateBatch", batches_pb2.CreateBatchResponse(batch=make_batch()))
    client = official(http, KEY)
    assert [model async for model in client.models.list()] == []
    await client.batches.create(**BATCH)  # type: ignore[arg-type]
    for call in locked.calls:
        assert call.metadata["x-nightshift-project"] == "a"
        assert call.metadata["x-nightshift-key"] == "key_a"
        assert "authorization" not in call.metadata
        assert KEY not in str(call.metadata)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/openapi.yaml", "/docs"])
async def test_operators_pages_need_no_key(http: httpx2.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 200


# contract: 97
async def test_grpc_asks_for_the_same_keys(
    channel: grpc.aio.Channel, locked: ScriptedStore
) -> None:
    models = models_pb2_grpc.ModelsStub(channel)
    wanted = models_pb2.ListModelsRequest()
    none = await refusal(models.ListModels(wanted))
    assert isinstance(none, AuthenticationError)
    assert none.message.startswith("You didn't provide an API key.")
    wrong = await refusal(models.ListModels(wanted, metadata=tuple(bearer(WRONG).items())))
    assert isinstance(wrong, AuthenticationError)
    assert wrong.code == "invalid_api_key"
    assert wrong.message.startswith(f"Incorrect API key provided: nsk********{WRONG[-4:]}.")
    # A key is asked for before anything else is judged, in streams too.
    files = files_pb2_grpc.FilesStub(channel)
    assert isinstance(await refusal(told(files.UploadFile(iter(())))), AuthenticationError)
    reading = files.ReadFile(files_pb2.ReadFileRequest(file_id="!"))
    assert isinstance(await refusal(reading.read()), AuthenticationError)
    assert (locked.calls, locked.uploads) == ([], [])
    locked.script("ListModels", models_pb2.ListModelsResponse())
    await models.ListModels(wanted, metadata=tuple(bearer(KEY).items()))
    assert locked.calls[0].metadata["x-nightshift-project"] == "a"


# contract: 99
async def test_a_key_is_held_to_its_limit(http: httpx2.AsyncClient, locked: ScriptedStore) -> None:
    locked.script("ListModels", *[models_pb2.ListModelsResponse()] * 3)
    headers = bearer(LIMITED)
    for left in ("1", "0"):
        answer = await http.get("/v1/models", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == left
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
    refused = await http.get("/v1/models", headers=headers)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "requests",
        "rate_limit_exceeded",
        None,
    )
    assert 0 < int(refused.headers["retry-after-ms"]) <= 30_000
    assert 0 < int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    # It is over in half a minute: a client may wait for it.
    assert "x-should-retry" not in refused.headers
    # Nobody else is held up.
    assert (await http.get("/v1/models", headers=bearer(KEY))).status_code == 200
    assert len(locked.calls) == 3


# contract: 99
async def test_the_official_client_is_told_of_the_limit(
    http: httpx2.AsyncClient, locked: ScriptedStore
) -> None:
    impatient = official(http, OFTEN).with_options(max_retries=0)
    refused: openai.RateLimitError | None = None
    while refused is None:
        try:
            await impatient.models.retrieve("none")
        except openai.NotFoundError:
            pass
        except openai.RateLimitError as error:
            refused = error
    assert refused.code == "rate_limit_exceeded"


# contract: 99
async def test_the_official_client_waits_and_succeeds(
    http: httpx2.AsyncClient, locked: ScriptedStore
) -> None:
    retries = 0
    # As often as the limit lets through at once, and on a slow machine once more.
    while not retries:
        locked.script("ListModels", models_pb2.ListModelsResponse())
        raw = await official(http, OFTEN).models.with_raw_response.list()
        assert raw.status_code == 200
        retries = raw.retries_taken
    # It would have guessed half a second, which is too short.
    assert retries == 1


# contract: 99
async def test_grpc_is_held_to_the_same_limit(
    channel: grpc.aio.Channel, locked: ScriptedStore
) -> None:
    locked.add_key(BY_GRPC, project_id="a", id="key_grpc", requests_per_minute=1)
    locked.script("ListModels", models_pb2.ListModelsResponse())
    models = models_pb2_grpc.ModelsStub(channel)
    metadata = tuple(bearer(BY_GRPC).items())
    call = models.ListModels(models_pb2.ListModelsRequest(), metadata=metadata)
    await call
    trailing = dict(await call.trailing_metadata() or ())
    assert trailing["x-ratelimit-remaining-requests"] == "0"
    assert str(trailing["x-request-id"]).startswith("req_")
    refused = models.ListModels(models_pb2.ListModelsRequest(), metadata=metadata)
    error = await refusal(refused)
    assert await refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(error, RateLimitedError)
    assert error.code == "rate_limit_exceeded"
    assert error.retry_after_seconds is not None
    assert 0 < error.retry_after_seconds <= 60


async def test_one_limit_for_all_keys_without_their_own() -> None:
    store = ScriptedStore()
    store.add_key(KEY, project_id="a", id="key_a")
    store.add_key(OFTEN, project_id="a", id="key_often", requests_per_minute=120)
    await store.start()
    settings = GatewaySettings(
        listen="127.0.0.1:0",
        grpc_listen="127.0.0.1:0",
        store=f"127.0.0.1:{store.port}",
        requests_per_minute=7,
    )
    async with running(settings, SECRET) as listening, httpx2.AsyncClient() as client:
        limits = []
        for key in (KEY, OFTEN):
            answer = await client.get(
                f"http://127.0.0.1:{listening.http_port}/v1/batches/none", headers=bearer(key)
            )
            assert answer.status_code == 404
            limits.append(answer.headers["x-ratelimit-limit-requests"])
        assert limits == ["7", "120"]
    await store.stop()


async def test_a_key_is_good_from_wherever_it_is_shown(
    http: httpx2.AsyncClient, locked: ScriptedStore
) -> None:
    locked.script("ListModels", models_pb2.ListModelsResponse())
    elsewhere = {"host": "evil.example", "origin": "http://evil.example"}
    headers = {**bearer(KEY), "sec-fetch-site": "cross-site", **elsewhere}
    assert (await http.get("/v1/models", headers=headers)).status_code == 200
    assert (await http.get("/v1/models", headers=elsewhere)).status_code == 401


async def test_idempotency_keys_reach_the_store_where_something_is_created(
    http: httpx2.AsyncClient, channel: grpc.aio.Channel, locked: ScriptedStore
) -> None:
    locked.script("CreateBatch", *[batches_pb2.CreateBatchResponse(batch=make_batch())] * 3)
    client = official(http, KEY)
    given = {"Idempotency-Key": "k 1"}
    await client.batches.create(**BATCH, extra_headers=given)  # type: ignore[arg-type]
    await client.batches.create(**BATCH)  # type: ignore[arg-type]
    await client.files.create(file=b"{}", purpose="batch", extra_headers=given)
    metadata = (*bearer(KEY).items(), ("idempotency-key", "k 1"))
    await batches_pb2_grpc.BatchesStub(channel).CreateBatch(
        batches_pb2.CreateBatchRequest(**BATCH), metadata=metadata
    )
    header = files_pb2.UploadFileRequest(header=files_pb2.UploadFileHeader(filename="a"))
    footer = files_pb2.UploadFileRequest(footer=files_pb2.UploadFileFooter(purpose="batch"))
    await files_pb2_grpc.FilesStub(channel).UploadFile(iter([header, footer]), metadata=metadata)
    keys = [call.metadata.get("idempotency-key") for call in locked.calls]
    assert keys == ["k 1", None, "k 1"]
    assert [upload.metadata.get("idempotency-key") for upload in locked.uploads] == ["k 1"] * 2


@pytest.mark.parametrize("key", ["k" * 256, "é", "a\tb"], ids=["long", "latin", "tab"])
async def test_a_bad_idempotency_key_is_refused(
    http: httpx2.AsyncClient, channel: grpc.aio.Channel, locked: ScriptedStore, key: str
) -> None:
    headers = {**bearer(KEY), "idempotency-key": key.encode("latin-1")}
    for path in ("/v1/batches", "/v1/files"):
        answer = await http.post(path, headers=headers, content=b"x")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "Idempotency-Key"
        assert "255 printable ASCII" in answer.json()["error"]["message"]
    if key.isascii() and key.isprintable():
        metadata = (*bearer(KEY).items(), ("idempotency-key", key))
        stub = batches_pb2_grpc.BatchesStub(channel)
        request = batches_pb2.CreateBatchRequest(**BATCH)
        assert isinstance(
            await refusal(stub.CreateBatch(request, metadata=metadata)), InvalidRequestError
        )
    assert locked.calls == []
