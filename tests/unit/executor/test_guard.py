"""The body does not steer the engine."""

from typing import Any

import orjson
import pytest

from services.executor.engines.base import EngineRequest
from services.executor.engines.bodies.bounds import BodyRefused
from services.executor.engines.bodies.fields import ALLOWED, REFUSED
from services.executor.engines.bodies.guard import guarded_body
from services.kit.wire.endpoints import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    EMBEDDINGS,
    RERANK,
    RESPONSES,
    SCORE,
)
from tests.kit.engine_contract import assert_envelope

pytestmark = pytest.mark.unit


def guarded(body: dict[str, Any] | bytes) -> dict[str, Any]:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return guarded_body(EngineRequest(CHAT_COMPLETIONS, "served", raw, "b" * 32, 1))


def parts(*contents: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(contents)}]}


def test_what_steers_is_dropped_and_what_asks_is_kept() -> None:
    kept = {"max_tokens": 5, "seed": 1, "tools": [], "response_format": {"type": "json_object"}}
    steers = (
        *("priority", "stream_options", "store", "background", "session_id", "x_simulate"),
        *("kv_transfer_params", "data_parallel_rank", "a_field_of_the_next_release"),
    )
    empty = dict.fromkeys(REFUSED, None) | {"modalities": ["text"], "best_of": 1}
    body = guarded(
        {"model": "alias", "request_id": "mine", **dict.fromkeys(steers, 1), **empty, **kept}
    )
    assert body == {"model": "served", "request_id": "b" * 32, **kept}


@pytest.mark.parametrize(
    ("endpoint", "field", "value"),
    [
        *((endpoint, field, "x") for endpoint in ALLOWED for field in ("chat_template", "audio")),
        (CHAT_COMPLETIONS, "guided_json", {"type": "object"}),
        (CHAT_COMPLETIONS, "modalities", ["text", "audio"]),
        (COMPLETIONS, "prompt_embeds", "AAAA"),
        (COMPLETIONS, "best_of", 4),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    endpoint: str, field: str, value: object
) -> None:
    raw = orjson.dumps({"model": "m", field: value})
    with pytest.raises(BodyRefused) as refused:
        guarded_body(EngineRequest(endpoint, "served", raw, "b" * 32, 1))
    error = assert_envelope(refused.value.response)
    assert (error["param"], field in error["message"]) == (field, True)


def test_caches_are_kept_apart_by_project() -> None:
    raw = orjson.dumps({"messages": [{}], "cache_salt": "another"})
    request = EngineRequest(CHAT_COMPLETIONS, "served", raw, "b" * 32, 1, "batch_1", "mine")
    assert guarded_body(request)["cache_salt"] == "mine"
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = guarded(parts({**part, "uuid": "another's"}))
    assert body["messages"][0]["content"] == [part]


def vast(count: object = 100_001) -> dict[str, Any]:
    """A schema that an engine may need a GiB for, and ever more."""
    return {"type": "object", "properties": {"a": {"type": "array", "minItems": count}}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": vast()}},
        ),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": vast(1e9)}}),
        ("response_format", {"schema": [vast(60_000), {"maxItems": 60_000}]}),
        ("structured_outputs", {"json": vast()}),
        ("structured_outputs", {"json": orjson.dumps(vast(10**12)).decode()}),
        ("structured_outputs", [vast(-1e300), vast()]),
        ("structured_outputs", {"json": ' {"min\\u0049tems":1e9}'}),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": vast()}}]),
        ("text", {"format": {"type": "json_schema", "schema": vast()}}),
    ],
)
def test_a_grammar_may_not_take_all_memory(field: str, value: object) -> None:
    with pytest.raises(BodyRefused) as refused:
        guarded({"model": "m", field: value})
    error = assert_envelope(refused.value.response)
    assert error["param"] == field
    assert "100000 items" in error["message"]


@pytest.mark.parametrize("messages", [5, "hi", {}, False])
def test_messages_are_an_array(messages: object) -> None:
    with pytest.raises(BodyRefused) as refused:
        guarded({"model": "m", "messages": messages})
    assert assert_envelope(refused.value.response)["param"] == "messages"


def test_a_schema_of_what_is_usual_is_taken() -> None:
    for schema in (vast(100_000), vast("many"), {"properties": {"minItems": vast(5)}}):
        for given in (schema, orjson.dumps(schema).decode(), "no schema: minItems"):
            outputs = {"json": given}
            assert guarded({"structured_outputs": outputs})["structured_outputs"] == outputs


def test_template_arguments_are_plain_and_replace_none_of_the_renderers() -> None:
    body = guarded(
        {
            "chat_template_kwargs": {
                "enable_thinking": False,
                "chat_template": "{{ 1 / 0 }}",
                "tokenize": True,
                "tools": [{"a": 1}],
                "nested": {"a": 1},
            }
        }
    )
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}},
        {"type": "image_url", "image_url": "https://example.com/a.png"},
        {"image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_image", "image_url": " data:image/png;base64,AA"},
        {"type": "audio_url", "audio_url": {"url": "ftp://example.com"}},
        {"type": "video_url", "video_url": {"url": 5}},
        {"type": "text", "text": "x", "inner": [{"deep": {"image_url": "http://localhost"}}]},
    ],
)
def test_media_from_elsewhere_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(BodyRefused) as refused:
        guarded(parts(part))
    assert assert_envelope(refused.value.response)["param"] == "messages"


def test_media_inside_the_body_is_taken() -> None:
    body = parts(
        {"type": "text", "text": "see http://example.com"},
        {"type": "image_url", "image_url": {"url": "DATA:image/png;base64,AAAA"}},
    )
    assert guarded(body)["messages"] == body["messages"]


@pytest.mark.parametrize(
    "raw", [b"[]", b"{", b'{"a":"\\ud83d"}', b'{"a":NaN}', b'{"chat_template_kwargs":[1]}']
)
def test_what_is_no_object_of_strict_json_is_refused(raw: bytes) -> None:
    with pytest.raises(BodyRefused) as refused:
        guarded(raw)
    assert_envelope(refused.value.response)


@pytest.mark.parametrize(
    ("endpoint", "body", "tokens"),
    [
        (CHAT_COMPLETIONS, {}, 512),
        (COMPLETIONS, {}, 512),
        (CHAT_COMPLETIONS, {"max_tokens": None, "max_completion_tokens": None}, 512),
        (CHAT_COMPLETIONS, {"max_tokens": 7}, 7),
        (CHAT_COMPLETIONS, {"max_completion_tokens": 7}, None),
        (CHAT_COMPLETIONS, {"max_tokens": "many"}, "many"),
        (EMBEDDINGS, {}, None),
        (RESPONSES, {}, None),
    ],
)
def test_a_line_that_does_not_say_how_many_gets_the_pools_tokens(
    endpoint: str, body: dict[str, Any], tokens: object
) -> None:
    request = EngineRequest(endpoint, "served", orjson.dumps(body), "b" * 32, 1)
    assert guarded_body(request, default_max_tokens=512).get("max_tokens") == tokens
    assert guarded_body(request).get("max_tokens") == body.get("max_tokens")


def responses_guarded(**body: Any) -> dict[str, Any]:
    raw = orjson.dumps({"input": "x", **body})
    return guarded_body(
        EngineRequest(RESPONSES, "served", raw, "b" * 32, 1), default_max_tokens=512
    )


def test_a_response_is_kept_nowhere() -> None:
    body = responses_guarded(store=True, background=True)
    assert body["store"] is False
    assert "background" not in body
    assert body["request_id"] == "resp_" + "b" * 32
    assert body["max_output_tokens"] == 512
    assert "max_tokens" not in body
    assert responses_guarded(max_output_tokens=7)["max_output_tokens"] == 7


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("prompt", {"id": "pmpt_1"}),
        ("tools", [{"type": "web_search_preview"}]),
        ("tools", [{"type": "mcp", "server_label": "x", "server_url": "http://10.0.0.1"}]),
        ("tools", [{"type": "function", "name": "f"}, "x"]),
    ],
)
def test_a_response_calls_and_names_nothing_of_others(field: str, value: object) -> None:
    with pytest.raises(BodyRefused) as refused:
        responses_guarded(**{field: value})
    assert assert_envelope(refused.value.response)["param"] == field


def test_a_responses_media_comes_inside() -> None:
    for part in (
        {"type": "input_image", "image_url": "http://10.0.0.1/x.png"},
        {"type": "input_file", "file_url": "http://10.0.0.1/x.pdf"},
    ):
        with pytest.raises(BodyRefused):
            responses_guarded(input=[{"role": "user", "content": [part]}])
    functions = [{"type": "function", "name": "f", "parameters": {}}]
    assert responses_guarded(tools=functions)["tools"] == functions


@pytest.mark.parametrize(
    ("endpoint", "field"),
    [
        *((SCORE, name) for name in ("text_1", "queries", "documents", "items", "data_2")),
        (RERANK, "query"),
        (RERANK, "documents"),
    ],
)
def test_what_is_scored_comes_inside(endpoint: str, field: str) -> None:
    def guarded(address: str) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": address}}
        raw = orjson.dumps({field: [{"content": [part]}], "priority": -1, "padding": "x"})
        return guarded_body(EngineRequest(endpoint, "served", raw, "b" * 32, 1))

    with pytest.raises(BodyRefused) as refused:
        guarded("http://10.0.0.1/x.png")
    assert assert_envelope(refused.value.response)["param"] == field
    body = guarded("data:image/png;base64,AA==")
    assert (body["model"], body["request_id"], body["padding"]) == ("served", "b" * 32, "x")
    assert "priority" not in body
