"""Batches, as the official client and raw HTTP see them."""

from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from protos.nightshift.v1 import batches_pb2, common_pb2, files_pb2
from services.kit.wire.errors import ConflictError, NotFoundError
from tests.kit.public_store import (
    CREATED_AT,
    DAY_SECONDS,
    ScriptedStore,
    batch_id,
    file_id,
    make_batch,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

GOOD = {
    "input_file_id": file_id(),
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}


def created(**fields: Any) -> batches_pb2.CreateBatchResponse:
    """Return the store's answer to a creation."""
    return batches_pb2.CreateBatchResponse(batch=make_batch(**fields))


async def test_fresh_batch_has_all_22_keys(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    store.script("CreateBatch", created())
    answer = await http.post("/v1/batches", json=GOOD)
    assert answer.status_code == 200
    assert answer.json() == {
        "id": batch_id(),
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "model": None,
        "errors": None,
        "input_file_id": file_id(),
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": CREATED_AT,
        "in_progress_at": None,
        "expires_at": CREATED_AT + DAY_SECONDS,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": None,
        "metadata": None,
        # The one key that is ours.
        "nightshift": dict.fromkeys(
            ("pool", "queue_position", "executors", "reason", "engine_revision")
        )
        | {"engines": []},
    }


async def test_ended_batch(client: AsyncOpenAI, store: ScriptedStore) -> None:
    batch = make_batch(
        status=batches_pb2.BATCH_STATUS_COMPLETED,
        model="m",
        output_file_id=file_id(2),
        in_progress_at=CREATED_AT + 1,
        finalizing_at=CREATED_AT + 2,
        completed_at=CREATED_AT + 3,
        request_counts=batches_pb2.RequestCounts(total=3, completed=2, failed=1),
        usage=common_pb2.Usage(
            input_tokens=7, cached_tokens=2, output_tokens=5, reasoning_tokens=1
        ),
        metadata={"k": "v"},
        has_metadata=True,
    )
    store.script("GetBatch", batches_pb2.GetBatchResponse(batch=batch))
    shown = await client.batches.retrieve(batch_id())
    assert (shown.status, shown.model, shown.output_file_id) == ("completed", "m", file_id(2))
    assert shown.error_file_id is None
    assert shown.request_counts is not None
    assert shown.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    assert shown.usage is not None
    assert shown.usage.to_dict() == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 12,
    }
    assert shown.metadata == {"k": "v"}


async def test_failed_batch_lists_its_errors(
    http: httpx2.AsyncClient, store: ScriptedStore
) -> None:
    errors = [
        batches_pb2.BatchError(code="invalid_json_line", line=2, message="no JSON"),
        batches_pb2.BatchError(code="invalid_request", message="gone", param="file_id"),
    ]
    batch = make_batch(status=batches_pb2.BATCH_STATUS_FAILED, errors=errors, failed_at=CREATED_AT)
    store.script("GetBatch", batches_pb2.GetBatchResponse(batch=batch))
    shown = (await http.get(f"/v1/batches/{batch_id()}")).json()
    assert shown["errors"] == {
        "object": "list",
        "data": [
            {"code": "invalid_json_line", "line": 2, "message": "no JSON", "param": None},
            {"code": "invalid_request", "line": None, "message": "gone", "param": "file_id"},
        ],
    }


async def test_everything_given_reaches_the_store(
    client: AsyncOpenAI, store: ScriptedStore
) -> None:
    store.script("CreateBatch", created(metadata={"a": "b"}, has_metadata=True))
    batch = await client.batches.create(
        input_file_id=file_id(),
        endpoint="/v1/embeddings",
        completion_window="24h",
        metadata={"a": "b"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert batch.metadata == {"a": "b"}
    assert store.requests("CreateBatch") == [
        batches_pb2.CreateBatchRequest(
            input_file_id=file_id(),
            endpoint="/v1/embeddings",
            completion_window="24h",
            completion_window_seconds=DAY_SECONDS,
            metadata={"a": "b"},
            has_metadata=True,
            output_expires_after=files_pb2.ExpiresAfter(anchor="created_at", seconds=3600),
        )
    ]
    assert store.calls[0].metadata["x-nightshift-project"] == "default"


async def test_null_is_absent(client: AsyncOpenAI, store: ScriptedStore) -> None:
    store.script("CreateBatch", created(), created(), created(has_metadata=True))
    await client.batches.create(**GOOD, metadata=None)  # type: ignore[arg-type]
    await client.batches.create(**GOOD, extra_body={"output_expires_after": None})  # type: ignore[arg-type]
    batch = await client.batches.create(**GOOD, metadata={})  # type: ignore[arg-type]
    assert batch.metadata == {}
    requests = store.requests("CreateBatch")
    assert [request.has_metadata for request in requests] == [False, False, True]
    assert not requests[1].HasField("output_expires_after")


async def test_configured_window(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    store.script("CreateBatch", created(completion_window="10s"))
    answer = await http.post("/v1/batches", json={**GOOD, "completion_window": "10s"})
    assert answer.status_code == 200
    assert store.requests("CreateBatch")[0].completion_window_seconds == 10


async def test_metadata_at_its_limits(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    store.script("CreateBatch", created())
    pairs = {f"{'é' * 62}{number:02}": "🌙" * 512 for number in range(16)}
    answer = await http.post("/v1/batches", json={**GOOD, "metadata": pairs})
    assert answer.status_code == 200, answer.text
    assert dict(store.requests("CreateBatch")[0].metadata) == pairs


def without(name: str) -> dict[str, Any]:
    """Return a good body that lacks `name`."""
    return {key: value for key, value in GOOD.items() if key != name}


def expiry(**fields: Any) -> dict[str, Any]:
    """Return a good body with an expiry."""
    return {**GOOD, "output_expires_after": fields}


ENDPOINTS = (
    "'/v1/chat/completions', '/v1/completions', '/v1/embeddings', '/v1/responses', '/v1/score' "
    "and '/v1/rerank'"
)
MISSING = "missing_required_parameter"

BAD_BODIES: list[tuple[Any, str, str | None, str]] = [
    *((without(name), MISSING, name, f"Missing required parameter: '{name}'.") for name in GOOD),
    ({}, MISSING, "input_file_id", "Missing required parameter"),
    (
        {**GOOD, "input_file_id": 7},
        "invalid_type",
        "input_file_id",
        "Invalid type for 'input_file_id': expected a string, but got an integer instead.",
    ),
    ({**GOOD, "input_file_id": None}, "invalid_type", "input_file_id", "got null instead"),
    ({**GOOD, "input_file_id": ""}, "empty_string", "input_file_id", "empty string"),
    ({**GOOD, "input_file_id": "x" * 513}, "string_above_max_length", "input_file_id", "512"),
    ({**GOOD, "input_file_id": "a\0"}, "invalid_value", "input_file_id", "U+0000"),
    (
        {**GOOD, "endpoint": "/v1/bogus"},
        "invalid_value",
        "endpoint",
        f"Invalid value: '/v1/bogus'. Supported values are: {ENDPOINTS}.",
    ),
    ({**GOOD, "endpoint": "/v1/moderations"}, "invalid_value", "endpoint", ENDPOINTS),
    ({**GOOD, "endpoint": True}, "invalid_type", "endpoint", "got a boolean instead"),
    *(
        (
            {**GOOD, "completion_window": window},
            "invalid_value",
            "completion_window",
            f"Invalid value: '{window}'. Supported values are: '24h' and '10s'.",
        )
        for window in ("1h", "48h", "")
    ),
    (
        {**GOOD, "metadata": {"tags": ["a"]}},
        "invalid_type",
        "metadata.tags",
        "Invalid type for 'metadata.tags': expected a string, but got an array instead.",
    ),
    ({**GOOD, "metadata": {"n": 1.5}}, "invalid_type", "metadata.n", "a decimal number"),
    ({**GOOD, "metadata": {"n": None}}, "invalid_type", "metadata.n", "got null"),
    ({**GOOD, "metadata": "x"}, "invalid_type", "metadata", "expected an object"),
    (
        {**GOOD, "metadata": {str(number): "" for number in range(17)}},
        "object_above_max_properties",
        "metadata",
        "too many properties",
    ),
    ({**GOOD, "metadata": {"k" * 65: ""}}, "property_name_above_max_length", "metadata", "65"),
    ({**GOOD, "metadata": {"k": "v" * 513}}, "string_above_max_length", "metadata.k", "513"),
    ({**GOOD, "metadata": {"k": "\0"}}, "invalid_value", "metadata.k", "U+0000"),
    ({**GOOD, "bogus": 1}, "unknown_parameter", "bogus", "Unknown parameter: 'bogus'."),
    (
        expiry(anchor="created_at", seconds=3599),
        "integer_below_min_value",
        "output_expires_after.seconds",
        "Expected a value >= 3600, but got 3599 instead.",
    ),
    (
        expiry(anchor="created_at", seconds=2592001),
        "integer_above_max_value",
        "output_expires_after.seconds",
        "<= 2592000",
    ),
    (
        expiry(anchor="created_at", seconds=2**40),
        "integer_above_max_value",
        "output_expires_after.seconds",
        "<= 2592000",
    ),
    (
        expiry(anchor="last_active_at", seconds=3600),
        "invalid_value",
        "output_expires_after.anchor",
        "'created_at'",
    ),
    (
        expiry(anchor="created_at", seconds="3600"),
        "invalid_type",
        "output_expires_after.seconds",
        "an integer",
    ),
    (
        expiry(anchor="created_at", seconds=True),
        "invalid_type",
        "output_expires_after.seconds",
        "a boolean",
    ),
    (expiry(anchor="created_at"), MISSING, "output_expires_after.seconds", "Missing"),
    (expiry(seconds=3600), MISSING, "output_expires_after.anchor", "Missing"),
    (
        expiry(anchor="created_at", seconds=3600, x=1),
        "unknown_parameter",
        "output_expires_after.x",
        "Unknown",
    ),
    ({**GOOD, "output_expires_after": []}, "invalid_type", "output_expires_after", "an array"),
]


@pytest.mark.parametrize(("body", "code", "param", "text"), BAD_BODIES)
async def test_bad_parameters(
    http: httpx2.AsyncClient, store: ScriptedStore, body: Any, code: str, param: str, text: str
) -> None:
    answer = await http.post("/v1/batches", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert text in error["message"]
    assert error["type"] == "invalid_request_error"
    assert store.calls == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"endpoint": "\\ud800"}',
        b"[" * 100_000,
        b"input_file_id=x",
    ],
)
async def test_body_that_is_no_json_object(
    http: httpx2.AsyncClient, store: ScriptedStore, body: bytes
) -> None:
    answer = await http.post("/v1/batches", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith("We could not parse the JSON body of your request.")
    assert ("not UTF-8 text" in error["message"]) == (body == b"\xff\xfe")
    assert (error["code"], error["param"]) == (None, None)


async def test_body_without_end_is_cut_off(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/v1/batches", content=b" " * 2_000_000)
    assert answer.status_code == 413
    assert "1048576" in answer.json()["error"]["message"]


async def test_last_of_two_equal_keys_wins(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    store.script("CreateBatch", created())
    body = (
        b'{"endpoint":"x","input_file_id":"f","completion_window":"24h",'
        b'"endpoint":"/v1/completions"}'
    )
    assert (await http.post("/v1/batches", content=body)).status_code == 200
    assert store.requests("CreateBatch")[0].endpoint == "/v1/completions"


async def test_cancel_with_and_without_a_body(
    client: AsyncOpenAI, http: httpx2.AsyncClient, store: ScriptedStore
) -> None:
    cancelling = make_batch(status=batches_pb2.BATCH_STATUS_CANCELLING, cancelling_at=CREATED_AT)
    store.script("CancelBatch", *[batches_pb2.CancelBatchResponse(batch=cancelling)] * 4)
    path = f"/v1/batches/{batch_id()}/cancel"
    assert (await client.batches.cancel(batch_id())).status == "cancelling"
    json_type = {"content-type": "application/json"}
    for options in ({}, {"headers": json_type}, {"content": b"{broken", "headers": json_type}):
        answer = await http.post(path, **options)  # type: ignore[arg-type]
        assert answer.status_code == 200
        assert answer.json()["cancelling_at"] == CREATED_AT


async def test_refused_cancel_costs_one_request(client: AsyncOpenAI, store: ScriptedStore) -> None:
    refusal = ConflictError("Cannot cancel a batch with status 'completed'.")
    store.script("CancelBatch", refusal)
    with pytest.raises(openai.ConflictError) as caught:
        await client.batches.cancel(batch_id())
    assert "Cannot cancel a batch with status 'completed'." in str(caught.value)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(store.calls) == 1


@pytest.mark.parametrize("wrong", ["nope", "a%20b", "%F0%9F%8C%99", "x" * 200])
async def test_unknown_batch(http: httpx2.AsyncClient, store: ScriptedStore, wrong: str) -> None:
    if wrong == "nope":
        for method in ("GetBatch", "CancelBatch", "ListBatches"):
            store.script(method, NotFoundError("No batch found with id 'nope'."))
    for method, path in (
        ("GET", f"/v1/batches/{wrong}"),
        ("POST", f"/v1/batches/{wrong}/cancel"),
        ("GET", f"/v1/batches?after={wrong}"),
    ):
        answer = await http.request(method, path)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["message"].startswith("No batch found with id '")
        # A scripted store says nothing of params.
        param = "after" if "after" in path and wrong != "nope" else None
        assert (error["code"], error["param"]) == (None, param)
