"""What the simulated engine says: the fast way and the strict one agree."""

import base64
import hashlib
import math
import struct
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from services.executor.engines.base import EngineRequest, EngineResponse, Usage
from services.executor.engines.simulated.answers import MAX_OUTPUT_BYTES, answer, fast_chat
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
NOW = 1_700_000_000


def request(
    body: dict[str, Any] | bytes, endpoint: str = CHAT_COMPLETIONS, attempt: int = 1
) -> EngineRequest:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return EngineRequest(endpoint, "m", raw, "a" * 32, attempt)


def chat(*texts: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text} for text in texts]
    return {"model": "m", "messages": messages, **fields}


def says(text: str) -> str:
    return "sim-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def body_of(response: EngineResponse) -> dict[str, Any]:
    assert response.status == 200, response
    body: dict[str, Any] = orjson.loads(response.body)
    return body


texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text('ab \t\n\x0b\x1c\u2003é\\"', max_size=30),
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.sampled_from([None, 1, 0, 100_000, 100_001, 2.5, True, "4"]),
        "max_completion_tokens": st.sampled_from([None, 1, 0]),
        "temperature": st.sampled_from([None, 0, 2, 2.1, -1, True, "hot"]),
        "n": st.sampled_from([None, 1, 2, 0, 1.5]),
        "x_simulate": st.sampled_from([None, {}, {"status": 400}, {"output_bytes": 30}]),
        "metadata": st.dictionaries(texts, texts, max_size=2),
    },
)


@given(st.lists(texts, max_size=3), fields)
def test_the_fast_way_agrees_with_the_strict_one(parts: list[str], extra: dict[str, Any]) -> None:
    line = request(chat(*parts, **extra))
    fast, strict = fast_chat(line, NOW), answer(line, NOW)
    if fast is None:
        return
    assert (fast.status, fast.usage) == (strict.status, strict.usage)
    assert orjson.loads(fast.body) == orjson.loads(strict.body)


@given(st.lists(texts, min_size=1, max_size=3))
def test_plain_chat_lines_go_the_fast_way(parts: list[str]) -> None:
    line = request(chat(*parts, max_tokens=4, temperature=0.5, top_p=0.9))
    assert fast_chat(line, NOW) is not None


def test_content_usage_and_fingerprint() -> None:
    response = answer(request(chat("be brief", "what is  it\n?")), NOW)
    body = body_of(response)
    assert body["choices"][0]["message"]["content"] == says("what is  it\n?")
    assert body["system_fingerprint"] == "simulated"
    assert body["created"] == NOW
    assert body["usage"]["prompt_tokens"] == 6
    assert response.usage == Usage(input_tokens=6, output_tokens=1)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "one two"),
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], ""),
        (None, ""),
        ("", ""),
    ],
)
def test_message_parts(content: Any, text: str) -> None:
    body = body_of(answer(request(chat("before", content)), NOW))
    assert body["choices"][0]["message"]["content"] == says(text)


def test_choices() -> None:
    response = answer(request(chat("hi", n=3)), NOW)
    assert [choice["index"] for choice in body_of(response)["choices"]] == [0, 1, 2]
    assert response.usage.output_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", [""]),
        ("a b", ["a b"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], ["1 2"]),
        ([[1], [2]], ["1", "2"]),
    ],
)
def test_completions(prompt: Any, expected: list[str]) -> None:
    body = body_of(answer(request({"model": "m", "prompt": prompt}, COMPLETIONS), NOW))
    assert body["object"] == "text_completion"
    assert [choice["text"] for choice in body["choices"]] == [says(text) for text in expected]


def test_embeddings() -> None:
    plain = {"model": "m", "input": ["a b", "c", "a b"]}
    response = answer(request(plain, EMBEDDINGS), NOW)
    vectors = [entry["embedding"] for entry in body_of(response)["data"]]
    assert vectors[0] == vectors[2] != vectors[1]
    assert math.isclose(sum(value * value for value in vectors[0]), 1)
    assert response.usage == Usage(input_tokens=5)
    packed = answer(
        request({**plain, "encoding_format": "base64", "dimensions": 100}, EMBEDDINGS), NOW
    )
    raw = base64.b64decode(body_of(packed)["data"][0]["embedding"])
    assert math.isclose(sum(value**2 for value in struct.unpack("<100f", raw)), 1, rel_tol=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        "say it",
        [{"role": "user", "content": "say it"}],
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "say it"}]},
        ],
    ],
)
def test_responses(given: Any) -> None:
    response = answer(request({"model": "m", "input": given}, RESPONSES), NOW)
    body = Response.model_validate(body_of(response))
    assert body.output_text == says("say it")
    assert (body.status, body.model) == ("completed", "m")
    assert body.usage is not None
    assert body.usage.input_tokens == response.usage.input_tokens > 0


@pytest.mark.parametrize(
    ("one", "other"),
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
def test_scores(one: str, other: str) -> None:
    body = {"model": "m", one: "a b", other: ["c", "a b", {"content": [{"text": "c"}]}]}
    response = answer(request(body, SCORE), NOW)
    found = body_of(response)
    assert (found["object"], found["created"], found["model"]) == ("list", NOW, "m")
    assert [(entry["object"], entry["index"]) for entry in found["data"]] == [
        ("score", 0),
        ("score", 1),
        ("score", 2),
    ]
    scores = [entry["score"] for entry in found["data"]]
    assert math.isclose(scores[1], 1)
    assert -1 < scores[0] == scores[2] < 0.99
    assert response.usage == Usage(input_tokens=6)
    assert found["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert answer(request(body, SCORE), NOW) == response


def test_scores_of_pairs() -> None:
    pairs = {"text_1": ["a", "b", "c"], "text_2": ["c", "b", "a"]}
    response = answer(request({"model": "m", **pairs}, SCORE), NOW)
    scores = [entry["score"] for entry in body_of(response)["data"]]
    assert math.isclose(scores[1], 1)
    assert scores[0] == scores[2] < 0.99


def test_rerank() -> None:
    texts = ["c", "d e", "a b", "f"]
    body = {"model": "m", "query": "a b", "documents": texts}
    response = answer(request(body, RERANK), NOW)
    results = body_of(response)["results"]
    assert results[0]["index"] == 2
    assert math.isclose(results[0]["relevance_score"], 1)
    assert sorted(result["index"] for result in results) == [0, 1, 2, 3]
    assert all(result["document"] == {"text": texts[result["index"]]} for result in results)
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert response.usage == Usage(input_tokens=8)
    for top_n, kept in ((0, 4), (None, 4), (2, 2), (9, 4)):
        some = body_of(answer(request({**body, "top_n": top_n}, RERANK), NOW))
        assert some["results"] == results[:kept]
    [only] = body_of(answer(request({**body, "documents": "x"}, RERANK), NOW))["results"]
    assert (only["index"], only["document"]) == (0, {"text": "x"})


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (SCORE, {"model": "m"}),
        (SCORE, {"model": "m", "text_1": "x"}),
        (SCORE, {"model": "m", "text_1": "x", "text_2": []}),
        (SCORE, {"model": "m", "text_1": "x", "text_2": 5}),
        (SCORE, {"model": "m", "text_1": ["x", "y"], "text_2": ["x", "y", "z"]}),
        (SCORE, {"model": "m", "text_1": "x", "text_2": "w " * 100_001}),
        (SCORE, {"model": "m", "text_1": "x", "text_2": ["x"] * 10_001}),
        (RERANK, {"model": "m", "query": "x"}),
        (RERANK, {"model": "m", "documents": ["x"]}),
        (RERANK, {"model": "m", "query": ["x"], "documents": ["x"]}),
        (RERANK, {"model": "m", "query": "x", "documents": ["x"], "top_n": -1}),
        (RERANK, {"model": "m", "query": "x", "documents": ["x"], "top_n": "all"}),
        (COMPLETIONS, {"model": "m"}),
        (COMPLETIONS, {"model": "m", "prompt": []}),
        (COMPLETIONS, {"model": "m", "prompt": {"a": 1}}),
        (COMPLETIONS, {"model": "m", "prompt": "w " * 100_001}),
        (EMBEDDINGS, {"model": "m"}),
        (EMBEDDINGS, {"model": "m", "input": [[]]}),
        (EMBEDDINGS, {"model": "m", "input": "x", "dimensions": 0}),
        (EMBEDDINGS, {"model": "m", "input": "x", "encoding_format": "hex"}),
        ("/v1/moderations", {"model": "m", "input": "x"}),
        (RESPONSES, {"model": "m"}),
        (RESPONSES, {"model": "m", "input": []}),
        (RESPONSES, {"model": "m", "input": ["x"]}),
        (RESPONSES, {"model": "m", "input": "x", "max_output_tokens": 0}),
        (RESPONSES, b'{"model":"m","input":"x","metadata":%b}' % (b"[" * 900 + b"]" * 900)),
        (CHAT_COMPLETIONS, {"messages": [{"role": "user", "content": "x"}]}),
        (CHAT_COMPLETIONS, chat(["x", 5])),
        (CHAT_COMPLETIONS, chat("x", max_tokens=100_001)),
        (CHAT_COMPLETIONS, chat("x", n=129)),
        (CHAT_COMPLETIONS, chat("x", x_simulate=[])),
        (CHAT_COMPLETIONS, chat("x", x_simulate={"crash": "yes"})),
        (CHAT_COMPLETIONS, chat("x", x_simulate={"hang": "line"})),
        (CHAT_COMPLETIONS, chat("x", x_simulate={"delay_ms": -1})),
        (CHAT_COMPLETIONS, chat("x", x_simulate={"status": 200})),
        (CHAT_COMPLETIONS, chat("x", x_simulate={"dealy_ms": 1})),
        (CHAT_COMPLETIONS, chat("x", n=2, x_simulate={"output_bytes": MAX_OUTPUT_BYTES})),
        (CHAT_COMPLETIONS, b"[1]"),
        (CHAT_COMPLETIONS, b'{"model": "m"'),
    ],
)
def test_refusals(endpoint: str, body: dict[str, Any] | bytes) -> None:
    assert_envelope(answer(request(body, endpoint), NOW))
    assert fast_chat(request(body, endpoint), NOW) is None


@pytest.mark.parametrize(
    ("status", "kind"), [(429, "requests"), (500, "server_error"), (404, "invalid_request_error")]
)
def test_simulated_status(status: int, kind: str) -> None:
    line = chat("x", x_simulate={"status": status, "times": 2})
    assert assert_envelope(answer(request(line), NOW), status)["type"] == kind
    assert answer(request(line, attempt=2), NOW).status == status
    assert answer(request(line, attempt=3), NOW).status == 200


@pytest.mark.parametrize("size", [0, 7, 20, 5_000_000])
def test_output_bytes(size: int) -> None:
    body = body_of(answer(request(chat("x", x_simulate={"output_bytes": size})), NOW))
    content = body["choices"][0]["message"]["content"]
    assert len(content) == size
    assert content.startswith(says("x")[:size])
