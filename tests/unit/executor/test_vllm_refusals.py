"""What vLLM's request classes refuse is said in the words of the body that was sent."""

from typing import Any

import pytest

from services.executor.engines.vllm.api import failure
from tests.kit.engine_contract import assert_envelope

pytestmark = pytest.mark.unit

MISSING = "Field required"
# As vLLM 0.32 wraps its classes.
WRAPPED = "function-wrap[__log_extra_fields__()]"


class InvalidBody(ValueError):
    """A fake of pydantic's error, which has what it found as a list."""

    def __init__(self, **fault: Any) -> None:
        super().__init__("1 validation error")
        self.fault = {"type": "x", "msg": "bad", **fault}

    def errors(self, **_shown: bool) -> list[dict[str, Any]]:
        return [self.fault]


@pytest.mark.parametrize(
    ("fault", "param", "message"),
    [
        ({"loc": ("temperature",)}, "temperature", "Invalid 'temperature': bad"),
        ({"loc": ("stop", "str")}, "stop", "Invalid 'stop': bad"),
        ({"loc": ("stop", "list[str]", 3)}, "stop", "Invalid 'stop.3': bad"),
        ({"loc": (WRAPPED, "input", "list[int]", 0)}, "input", "Invalid 'input.0': bad"),
        (
            {"loc": ("response_format", WRAPPED, "type")},
            "response_format",
            "Invalid 'response_format.type': bad",
        ),
        (
            {"loc": ("ChatCompletionRequest", "model"), "type": "missing", "msg": MISSING},
            "model",
            "Missing required parameter: 'model'.",
        ),
        # A content part, which is looked at by itself.
        (
            {"loc": (0, "ChatCompletionContentPartTextParam", "text"), "type": "missing"},
            "messages",
            "Invalid 'messages.0.text': bad",
        ),
        ({"loc": ()}, None, "bad"),
        ({"loc": (WRAPPED,)}, None, "bad"),
        ({"loc": (), "ctx": {"error": ValueError("say it so")}}, None, "say it so"),
    ],
)
def test_a_refusal_names_the_field(fault: dict[str, Any], param: str | None, message: str) -> None:
    error = assert_envelope(failure(InvalidBody(**fault)))
    assert (error["param"], error["message"]) == (param, message)
