"""What `make run` shows, with answers that a model of the user's own may give."""

import json
from typing import Any

import pytest

from services.cli.commands.demo import EXAMPLE, show_answers

pytestmark = pytest.mark.unit


def test_a_shown_line_that_the_model_refuses_is_told_with_those_that_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    requests: list[dict[str, Any]] = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    answer = {"choices": [{"message": {"content": "well"}}]}
    results: dict[str, dict[str, Any]] = {
        one["custom_id"]: {"response": {"status_code": 200, "body": answer}, "error": None}
        for one in requests
    }
    refused = {"error": {"message": "too long for it"}}
    results["cook-01"]["response"] = {"status_code": 400, "body": refused}
    results["write-01"] = {"response": None, "error": {"message": "ran too long"}}
    results["fact-01"]["response"]["body"] = {"choices": [{"message": {"content": None}}]}
    show_answers(requests, results)
    shown, _, failed = capsys.readouterr().out.partition("==> The lines that failed")
    assert "fact-01" in shown
    assert "cook-01" not in shown
    assert "write-01" not in shown
    assert "cook-01: HTTP 400: too long for it" in failed
    assert "write-01: ran too long" in failed
