"""A batch of a running system whose input somebody deletes, as its owner sees it."""

import json
import re

import openai
import pytest

from tests.kit.batches import chats, jsonl
from tests.kit.up import RunningUp, running_up, up, wait_until

__all__ = ["running_up", "up"]

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LINES = 400


def content() -> bytes:
    """Requests that take the engine's seats for a while."""
    return jsonl(chats(LINES, x_simulate={"delay_ms": 400}))


def opened(up: RunningUp) -> int:
    """How often an executor began a chunk that could not be read."""
    return len(re.findall("lines_not_read", up.log.read_text(errors="replace")))


def test_it_says_why_it_waits_and_a_cancel_ends_it(up: RunningUp) -> None:
    client = openai.OpenAI(base_url=up.base_url, api_key="none", max_retries=2)
    file = client.files.create(file=("input.jsonl", content()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )

    def shown() -> openai.types.Batch:
        return client.batches.retrieve(batch.id)

    def reason() -> str:
        return (shown().model_extra or {})["nightshift"]["reason"] or ""

    wait_until(lambda: shown().request_counts.completed > 20, 30)
    for kind in ("file", "index"):
        for blob in (up.data / "blobs" / "default" / kind).iterdir():
            blob.unlink()
    wait_until(lambda: file.id in (reason()), 30)
    # Looked for again after 5 s, and not by each chunk as fast as it can.
    assert opened(up) < 10

    with pytest.raises(openai.InternalServerError) as told:
        client.files.content(file.id)
    assert told.value.code == "content_lost"
    assert told.value.response.headers["x-should-retry"] == "false"

    client.batches.cancel(batch.id)
    wait_until(lambda: shown().status == "cancelled", 15)
    ended = shown()
    assert [error.code for error in ended.errors.data] == ["input_lost"]
    output = client.files.content(ended.output_file_id).text.splitlines()
    error = client.files.content(ended.error_file_id).text.splitlines()
    assert len(output) == ended.request_counts.completed
    assert len(output) + len(error) == LINES
    assert {json.loads(line)["custom_id"] for line in error} == {None}
