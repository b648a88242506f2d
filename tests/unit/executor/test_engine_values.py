"""Usage and errors as engines report them."""

from typing import Any

import orjson
import pytest

from services.executor.engines.base import (
    NO_USAGE,
    EngineResponse,
    Usage,
    answered,
    error_body,
    usage_of,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, NO_USAGE),
        ([], NO_USAGE),
        ({"prompt_tokens": 7, "total_tokens": 7}, Usage(7, 0, 0, 0)),
        (
            {
                "prompt_tokens": 7,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {"reasoning_tokens": 2},
            },
            Usage(7, 4, 3, 2),
        ),
        (
            {
                "input_tokens": 7,
                "output_tokens": 3,
                "input_tokens_details": {"cached_tokens": 4},
                "output_tokens_details": None,
            },
            Usage(7, 4, 3, 0),
        ),
        ({"prompt_tokens": "7", "completion_tokens": -1}, NO_USAGE),
    ],
)
def test_usage(usage: Any, expected: Usage) -> None:
    assert usage_of({"usage": usage}) == expected
    assert usage_of({}) == NO_USAGE


def test_an_error_is_utf_8_whatever_it_quotes() -> None:
    body = orjson.loads(error_body("cut \ud83d", type_="server_error"))
    assert body == {
        "error": {"message": "cut ?", "type": "server_error", "param": None, "code": None}
    }


@pytest.mark.parametrize(
    ("content", "body"),
    [
        ({"a": [1, "x", None], 2: True}, b'{"a":[1,"x",null],"2":true}'),
        ({"logprobs": [float("-inf"), float("nan")]}, b'{"logprobs":[null,null]}'),
        (
            {"calls": [{"arguments": '{"say":"cut \ud83d"}'}]},
            rb'{"calls":[{"arguments":"{\"say\":\"cut ?\"}"}]}',
        ),
        ({"cut \ude00": 1}, b'{"cut ?":1}'),
    ],
)
def test_an_answer_is_strict_json(content: dict[str, Any], body: bytes) -> None:
    usage = Usage(1, 0, 2, 0)
    assert answered(content, usage) == EngineResponse(200, body, usage)


@pytest.mark.parametrize("levels", [300, 1_022])
def test_an_answer_too_deep_to_be_written_is_a_refusal(levels: int) -> None:
    repeated = orjson.loads(b"[" * levels + b"]" * levels)
    response = answered({"tools": repeated}, NO_USAGE)
    assert (response.status, b"nested too deeply" in response.body) == (400, True)
