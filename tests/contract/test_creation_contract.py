"""Creating batches, numbers 24 to 38 and 98 of the contract, over a whole running system."""

import json
import re
from typing import Any, Final

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from tests.contract.test_files_contract import error_of
from tests.kit.batches import CHAT, Json, chats, create, ended, jsonl, submit, upload

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

PATH: Final = "/v1/batches"
BATCH_KEYS: Final = {
    *("id", "object", "endpoint", "model", "errors", "input_file_id", "completion_window"),
    *("status", "output_file_id", "error_file_id", "created_at", "in_progress_at"),
    *("expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at", "request_counts", "usage", "metadata"),
}
UNSET: Final = BATCH_KEYS - {
    *("id", "object", "endpoint", "input_file_id", "completion_window", "status"),
    *("created_at", "expires_at", "request_counts", "usage"),
}


async def good(client: AsyncOpenAI) -> Json:
    """Return the body of a creation that is sound."""
    return {
        "input_file_id": await upload(client, chats(1)),
        "endpoint": CHAT,
        "completion_window": "24h",
    }


# contract: 24, 25, 26, 27
async def test_a_fresh_batch(openai_client: AsyncOpenAI, http: httpx2.AsyncClient) -> None:
    body = await good(openai_client)
    answer = await http.post(PATH, json=body)
    assert answer.status_code == 200
    batch = answer.json()
    assert {key for key in batch if key != "nightshift"} == BATCH_KEYS
    assert len(BATCH_KEYS) == 22
    assert {key for key, value in batch.items() if value is None} == UNSET
    assert (batch["object"], batch["status"]) == ("batch", "validating")
    assert batch["expires_at"] - batch["created_at"] == 86_400
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert batch["usage"]["total_tokens"] == 0
    assert re.fullmatch(r"batch_[0-9a-f]{32}", batch["id"])
    assert {name: batch[name] for name in body} == body
    done = await http.get(f"{PATH}/{batch['id']}")
    assert {key for key in done.json() if key != "nightshift"} == BATCH_KEYS


# contract: 27
async def test_metadata(openai_client: AsyncOpenAI) -> None:
    metadata = {"who": "me", "k" * 64: "v" * 512, "emoji": "\N{CRESCENT MOON}", "empty": ""}
    batch = await submit(openai_client, chats(1), metadata=metadata)
    assert batch.metadata == metadata
    assert (await ended(openai_client, batch)).metadata == metadata
    assert (await submit(openai_client, chats(1))).metadata is None
    # The client sends this null as it is.
    assert (await submit(openai_client, chats(1), metadata=None)).metadata is None


# contract: 28
@pytest.mark.parametrize("name", ["input_file_id", "endpoint", "completion_window"])
async def test_a_field_is_missing(
    openai_client: AsyncOpenAI, http: httpx2.AsyncClient, name: str
) -> None:
    body = await good(openai_client)
    del body[name]
    error = error_of(await http.post(PATH, json=body))
    assert (error["code"], error["param"]) == ("missing_required_parameter", name)
    assert error["message"] == f"Missing required parameter: '{name}'."


# contract: 29, 30
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("endpoint", "/v1/bogus", "'/v1/chat/completions'"),
        ("endpoint", "/v1/chat/completions/", "'/v1/chat/completions'"),
        *(("completion_window", value, "'24h'") for value in ("1h", "48h", "", "24H", "24h ")),
    ],
)
async def test_a_value_that_is_none(
    openai_client: AsyncOpenAI, field: str, value: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await openai_client.batches.create(**{**await good(openai_client), field: value})
    assert (caught.value.code, caught.value.param) == ("invalid_value", field)
    assert f"Invalid value: '{value}'. Supported values are: " in str(caught.value)
    assert says in str(caught.value)


# contract: 31, 32, 33
@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"metadata": {"tags": ["a"]}}, "invalid_type", "metadata.tags"),
        (
            {"metadata": {str(number): "" for number in range(17)}},
            "object_above_max_properties",
            "metadata",
        ),
        ({"metadata": {"k" * 65: ""}}, "property_name_above_max_length", "metadata"),
        ({"metadata": {"k": "v" * 513}}, "string_above_max_length", "metadata.k"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 3_599}},
            "integer_below_min_value",
            "output_expires_after.seconds",
        ),
        (
            {"output_expires_after": {"anchor": "last_active_at", "seconds": 3_600}},
            "invalid_value",
            "output_expires_after.anchor",
        ),
    ],
)
async def test_past_a_limit(
    openai_client: AsyncOpenAI, fields: dict[str, Any], code: str, param: str
) -> None:
    before = (await openai_client.batches.list(limit=1)).data
    with pytest.raises(openai.BadRequestError) as caught:
        await openai_client.batches.create(**{**await good(openai_client), **fields})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert (await openai_client.batches.list(limit=1)).data == before


# contract: 32
async def test_at_the_limits(openai_client: AsyncOpenAI) -> None:
    metadata = {f"{'k' * 62}{number:02}": "v" * 512 for number in range(16)}
    assert (await submit(openai_client, chats(1), metadata=metadata)).metadata == metadata


# contract: 34
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b"a=b", b'{"a":NaN}', b"[" * 10_000]
)
async def test_a_body_that_is_no_object(http: httpx2.AsyncClient, body: bytes) -> None:
    error = error_of(await http.post(PATH, content=body))
    assert error["message"].startswith("We could not parse the JSON body of your request.")
    assert (error["code"], error["param"]) == (None, None)


# contract: 35, 36
async def test_a_file_that_is_not_to_be_had(openai_client: AsyncOpenAI) -> None:
    client = openai_client
    other = await client.files.create(file=("x.jsonl", jsonl(chats(1))), purpose="user_data")
    deleted = await upload(client, chats(1))
    await client.files.delete(deleted)
    for file_id in (
        "file-" + "0" * 32,
        other.id,
        deleted,
        "x" * 512,
        "../../x",
        "\N{CRESCENT MOON}",
    ):
        batch = await create(client, file_id)
        assert (batch.status, batch.input_file_id) == ("validating", file_id)
        done = await ended(client, batch, 5)
        assert done.status == "failed"
        assert done.in_progress_at is None
        assert done.errors is not None
        [error] = done.errors.data or []
        assert (error.code, error.line, error.param) == ("invalid_request", None, "file_id")
        if file_id != other.id:
            assert (error.message or "").startswith("Cannot find file")


# contract: 38
async def test_two_batches_of_one_file(openai_client: AsyncOpenAI) -> None:
    file_id = await upload(openai_client, chats(3))
    both = [await create(openai_client, file_id) for _ in range(2)]
    assert both[0].id != both[1].id
    for batch in both:
        done = await ended(openai_client, batch)
        assert done.request_counts is not None
        assert (done.status, done.request_counts.completed) == ("completed", 3)


WRONG: Final[list[Any]] = [None, True, 7, -1, 1.5, 10**30, "x", "\0", [], ["x"], {}, {"a": {}}]
CODES: Final = {
    *("invalid_type", "invalid_value", "missing_required_parameter", "unknown_parameter"),
}
NULL_IS_ABSENT: Final = {"metadata", "output_expires_after"}
FIELDS: Final = [
    *("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"),
]


async def test_every_wrong_type_of_every_field(
    openai_client: AsyncOpenAI, http: httpx2.AsyncClient
) -> None:
    body = await good(openai_client)
    for field in FIELDS:
        for value in WRONG:
            answer = await http.post(PATH, json={**body, field: value})
            if answer.status_code == 200:
                # Null means absent, any text may be a file's id, and no pairs are few enough.
                assert (
                    (value is None and field in NULL_IS_ABSENT)
                    or (field == "input_file_id" and value == "x")
                    or (field == "metadata" and value == {})
                ), (field, value)
                continue
            error = error_of(answer)
            assert error["param"].split(".")[0] == field, (field, value)
            assert error["code"] in CODES, (field, value, error)
            assert field in error["message"] or "Invalid value" in error["message"]


async def test_queries_of_every_wrong_kind(http: httpx2.AsyncClient) -> None:
    for path in (PATH, "/v1/files"):
        for limit in ("x", "1.5", "1e1", "0x1", "٣", "-0", "99999999999999999999999", " 1", "1;2"):
            error = error_of(await http.get(path, params={"limit": limit}))
            assert error["param"] == "limit"
        for after in ("nothing", "\0", "a/b", "é", "x" * 5_000):
            answer = await http.get(path, params={"after": after})
            assert error_of(answer, 404)["message"].startswith(
                "No batch found with id" if path == PATH else "No such File object"
            )
        for odd in ("limit=&after=&order=&purpose=", "limit=5&limit=5", "x=1", "%ff=%fe", "&&&"):
            assert (await http.get(f"{path}?{odd}")).status_code == 200


# contract: 98
async def test_unknown_routes_and_wrong_methods(http: httpx2.AsyncClient) -> None:
    some = "batch_" + "0" * 32
    for method, path, status in (
        ("POST", "/v1/x", 404),
        ("GET", "/", 404),
        ("GET", "/v1/batches/a/b", 404),
        ("GET", "/v2/batches", 404),
        ("GET", "/v1/batches/%2e%2e/files/../../x", 404),
        ("PUT", PATH, 405),
        ("DELETE", f"{PATH}/{some}", 405),
        ("GET", f"{PATH}/{some}/cancel", 405),
        ("PATCH", "/v1/files", 405),
        ("POST", "/v1/models", 405),
    ):
        error = error_of(await http.request(method, path, content=b"{}"), status)
        assert error["code"] == ("method_not_supported" if status == 405 else None)
        assert "detail" not in error


# contract: 96
async def test_every_answer_names_its_request(
    openai_client: AsyncOpenAI, http: httpx2.AsyncClient
) -> None:
    ids = set()
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", PATH),
        ("POST", PATH),
        ("GET", "/v1/x"),
        ("PUT", PATH),
        ("GET", f"{PATH}/batch_0"),
        ("POST", "/v1/files"),
        ("GET", "/healthz"),
    ):
        answer = await http.request(method, path)
        assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])
        ids.add(answer.headers["x-request-id"])
    assert len(ids) == 8

    raw = await openai_client.batches.with_raw_response.create(**await good(openai_client))
    assert raw.request_id == raw.headers["x-request-id"]
    assert raw.parse()._request_id == raw.request_id
    assert json.loads(raw.http_response.content)["status"] == "validating"
    with pytest.raises(openai.NotFoundError) as caught:
        await openai_client.batches.retrieve("batch_0")
    assert caught.value.request_id == caught.value.response.headers["x-request-id"]
