"""A batch of two models over a running system of two pools."""

import json
from pathlib import Path

import openai
import pytest

from tests.integration.test_up import nightshift, requests
from tests.kit.up import running_up

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LINES = 1_200


def test_lines_of_two_models_run_on_two_pools_and_come_out_in_order(tmp_path: Path) -> None:
    lines = requests(LINES).splitlines(keepends=True)
    models = ["b" if number % 3 else "a" for number in range(LINES)]
    content = [
        line.replace(b'"simulated"', f'"{model}"'.encode())
        for line, model in zip(lines, models, strict=True)
    ]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(content))
    with running_up(
        tmp_path / "data",
        ["--engine", "simulated", "--model", "a", "--model", "b"],
        {"NIGHTSHIFT_STORE_MIXED_MODELS": "true"},
    ) as up:
        status, out, err = nightshift("submit", str(path), "--watch", url=up.base_url)
        assert status == 0, err
        batch_id = out.split()[0]
        status, out, err = nightshift("results", batch_id, url=up.base_url)
        assert (status, err) == (0, "")
        answers = [json.loads(line) for line in out.splitlines()]
        assert [each["custom_id"] for each in answers] == [f"r{n}" for n in range(LINES)]
        assert [each["response"]["body"]["model"] for each in answers] == models
        client = openai.OpenAI(base_url=up.base_url, api_key="any")
        assert client.batches.retrieve(batch_id).model == "a"
        client.close()
