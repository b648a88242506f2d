"""Usage and errors as engines report them."""

from typing import Any

import orjson
import pytest

from services.executor.engines.base import NO_USAGE, Usage, error_body, usage_of

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
