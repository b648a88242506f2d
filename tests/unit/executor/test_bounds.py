"""Bodies within the bounds pass as they are, those beyond are refused: by every engine alike."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.engines.base import EngineRequest
from services.executor.engines.bodies.bounds import (
    MOST_ALTERNATIVES,
    MOST_CHOICES,
    MOST_ELEMENTS,
    MOST_GRAMMAR_CHARACTERS,
    BodyRefused,
    sequences_in,
)
from services.executor.engines.bodies.fields import ALLOWED, REFUSED
from services.executor.engines.bodies.guard import guarded_body
from services.executor.engines.simulated.answers import answer, fast_chat
from services.kit.wire.endpoints import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    EMBEDDINGS,
    RERANK,
    RESPONSES,
    SCORE,
)
from services.kit.wire.values import MOST_NUMBERS, MOST_VALUES
from tests.kit.engine_contract import assert_envelope

pytestmark = pytest.mark.unit

USER = {"role": "user", "content": "hi"}


def request(endpoint: str, body: object) -> EngineRequest:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return EngineRequest(endpoint, "m", raw, "a" * 32, 1)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER], **fields}


def parts(count: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "x"}] * count


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def schema(value: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}


Body = Callable[[int], dict[str, Any]]
BOUNDS: dict[str, tuple[str, int, str | None, Body]] = {
    # Kind of body: its endpoint, the bound, what the refusal names, and a body of that size.
    "values": (CHAT_COMPLETIONS, MOST_VALUES - 6, None, lambda n: chat(x={"y": [""] * (n - 1)})),
    "numbers": (COMPLETIONS, MOST_NUMBERS, None, lambda n: {"model": "m", "x": [7] * n}),
    "messages": (CHAT_COMPLETIONS, MOST_ELEMENTS, "messages", lambda n: chat(messages=[USER] * n)),
    "parts of one": (
        CHAT_COMPLETIONS,
        MOST_ELEMENTS,
        "messages",
        lambda n: chat(messages=[{"role": "user", "content": parts(n)}]),
    ),
    "parts of many": (
        RESPONSES,
        MOST_ELEMENTS,
        "input",
        lambda n: {"model": "m", "input": [{"content": parts(n - 1)}, {"content": parts(1)}]},
    ),
    "arguments": (
        CHAT_COMPLETIONS,
        MOST_VALUES,
        "messages",
        lambda n: chat(messages=[call("[" + '"",' * (n // 2 - 1) + '""]')] * 2),
    ),
    "tools": (
        CHAT_COMPLETIONS,
        MOST_ELEMENTS,
        "tools",
        lambda n: chat(tools=[{"type": "function", "function": {"name": "f"}}] * n),
    ),
    "map": (
        CHAT_COMPLETIONS,
        MOST_ELEMENTS,
        "logit_bias",
        lambda n: chat(logit_bias={str(key): 1 for key in range(n)}),
    ),
    "inputs": (EMBEDDINGS, MOST_ELEMENTS, "input", lambda n: {"model": "m", "input": ["x"] * n}),
    "documents": (
        RERANK,
        MOST_ELEMENTS,
        "documents",
        lambda n: {"model": "m", "query": "x", "documents": ["y"] * n},
    ),
    "pairs": (
        SCORE,
        MOST_ELEMENTS,
        "text_2",
        lambda n: {"model": "m", "text_1": "x", "text_2": ["y"] * n},
    ),
    "n": (CHAT_COMPLETIONS, MOST_CHOICES, "n", lambda n: chat(n=n)),
    "answers": (
        COMPLETIONS,
        MOST_CHOICES,
        "n",
        lambda n: {"model": "m", "prompt": ["x"] * (MOST_ELEMENTS // MOST_CHOICES), "n": n},
    ),
    "choice": (
        CHAT_COMPLETIONS,
        MOST_ALTERNATIVES,
        "structured_outputs",
        lambda n: chat(structured_outputs={"choice": ["y"] * n}),
    ),
    "regex": (
        CHAT_COMPLETIONS,
        MOST_ALTERNATIVES,
        "structured_outputs",
        lambda n: chat(structured_outputs={"regex": "|" * n}),
    ),
    "enum": (
        CHAT_COMPLETIONS,
        MOST_ALTERNATIVES,
        "response_format",
        lambda n: chat(response_format=schema({"enum": ["y"] * n})),
    ),
    "properties": (
        CHAT_COMPLETIONS,
        MOST_ALTERNATIVES,
        "response_format",
        lambda n: chat(
            response_format=schema({"properties": {str(key): True for key in range(n)}})
        ),
    ),
    "schema as text": (
        CHAT_COMPLETIONS,
        MOST_ALTERNATIVES,
        "structured_outputs",
        lambda n: chat(structured_outputs={"json": orjson.dumps({"enum": ["y"] * n}).decode()}),
    ),
    "long choice": (
        CHAT_COMPLETIONS,
        MOST_GRAMMAR_CHARACTERS,
        "structured_outputs",
        lambda n: chat(structured_outputs={"choice": ["y" * (n - 1), "y"]}),
    ),
}


@pytest.mark.parametrize("kind", BOUNDS)
def test_engines_take_up_to_each_bound_and_refuse_above(kind: str) -> None:
    endpoint, bound, param, body = BOUNDS[kind]
    guarded_body(request(endpoint, body(bound)))
    for beyond in (bound + 2, 3 * bound):
        asked = request(endpoint, body(beyond))
        with pytest.raises(BodyRefused) as refused:
            guarded_body(asked)
        error = assert_envelope(refused.value.response)
        assert error["param"] == param
        assert fast_chat(asked, 0) is None
        assert answer(asked, 0) == refused.value.response


@given(
    st.dictionaries(
        st.sampled_from(["messages", "temperature", "user", "priority", "x"]),
        st.none() | st.integers(0, 2) | st.lists(st.just(USER) | st.none(), max_size=3),
    )
)
def test_within_the_bounds_a_body_passes_as_it_is(body: dict[str, Any]) -> None:
    if not isinstance(body.get("messages"), list):
        body.pop("messages", None)
    passed = guarded_body(request(CHAT_COMPLETIONS, body))
    allowed = {key: value for key, value in body.items() if key in ALLOWED[CHAT_COMPLETIONS]}
    assert passed == allowed | {"model": "m", "request_id": "a" * 32}


@pytest.mark.parametrize(
    ("endpoint", "body", "sequences"),
    [
        (CHAT_COMPLETIONS, chat(), 1),
        (CHAT_COMPLETIONS, chat(n=5), 5),
        (CHAT_COMPLETIONS, b'{"\\u006E":5}', 5),
        (CHAT_COMPLETIONS, b'{"n":2,"n":3}', 3),
        (CHAT_COMPLETIONS, chat(n=None), 1),
        (COMPLETIONS, {"prompt": "x", "n": 3}, 3),
        (COMPLETIONS, {"prompt": ["x", "y"], "n": 3}, 6),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, 1),
        (COMPLETIONS, b'{"prompt": [ [1], [2, 3]] }', 2),
        (EMBEDDINGS, {"input": ["x"] * 2_048}, 2_048),
        (RERANK, {"query": "x", "documents": ["y"] * 7}, 7),
        (SCORE, {"text_1": ["x", "y"], "text_2": ["y", "z"]}, 2),
        # What is refused takes no more than one seat to be refused in.
        (CHAT_COMPLETIONS, b'{"n":' + b"9" * 10_000 + b"}", 1),
        (COMPLETIONS, {"prompt": [[]] * 100_000}, 1),
        (COMPLETIONS, {"prompt": []}, 1),
        (COMPLETIONS, b"[", 1),
    ],
)
def test_a_lines_sequences_are_counted(endpoint: str, body: object, sequences: int) -> None:
    asked = request(endpoint, body)
    assert sequences_in(asked.endpoint, asked.body) == sequences


def test_the_fields_are_written_down() -> None:
    text = (Path(__file__).parents[3] / "docs/compatibility.md").read_text()
    section = text.split("## Fields of a line's body")[1].split("\n## ")[0]
    assert set(re.findall(r"`([a-z_0-9]+)`", section)) >= REFUSED.union(*ALLOWED.values())
