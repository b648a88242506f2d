"""`nightshift backup` and `nightshift restore` on a system that runs, as its operator uses them."""

import json
import signal
from pathlib import Path

import httpx
import openai
import pytest

from services.store.db.only_store import UNFINISHED
from tests.kit import backups
from tests.kit.data_at_rest import check
from tests.kit.started_lines import read_started, started_to
from tests.kit.store import chat_line
from tests.kit.up import RunningUp, running_up, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LINES = 600
DELAY_MS = 200


def client_of(up: RunningUp) -> openai.OpenAI:
    """Return the official client."""
    return openai.OpenAI(base_url=up.base_url, api_key="none", max_retries=0)


def begin(client: openai.OpenAI, *, delay_ms: int, lines: int = LINES) -> str:
    """Create a batch."""
    content = b"".join(
        chat_line(f"r{number}", f"hello {number}", x_simulate={"delay_ms": delay_ms})
        for number in range(lines)
    )
    file = client.files.create(file=("input.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    ).id


def done(client: openai.OpenAI, batch_id: str) -> int:
    """Return how many of its lines have a result."""
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def answers(client: openai.OpenAI, batch_id: str) -> dict[str, str]:
    """Wait for a batch's end; return the answer of each line by its custom id."""
    wait_until(lambda: client.batches.retrieve(batch_id).status == "completed", 90, "completed")
    file_id = client.batches.retrieve(batch_id).output_file_id
    assert file_id is not None
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }
    assert len(lines) == len(found) == len(set(found.values()))
    return found


@pytest.mark.timeout(300)
def test_a_backup_of_what_runs_goes_on_elsewhere_with_nothing_lost_or_done_twice(
    tmp_path: Path,
) -> None:
    with running_up(tmp_path / "data") as up:
        client = client_of(up)
        ended = begin(client, delay_ms=0, lines=5)
        told = answers(client, ended)
        running = begin(client, delay_ms=DELAY_MS)
        wait_until(lambda: done(client, running) > LINES // 10, 60, "it runs")
        # It holds what is in flight, however long the backup takes.
        up.kill("executor-0", signal.SIGSTOP)
        before = done(client, running)
        said = backups.command("backup", "--to", str(tmp_path / "backup"), "--data", str(up.data))
        assert said.startswith(f"backed up to {tmp_path / 'backup'}: ")
        up.kill("executor-0", signal.SIGCONT)
        # The one that it was taken of does not notice.
        expected = answers(client, running)
        assert len(expected) == LINES
    assert check(tmp_path / "backup", deep=True).faults == []

    said = backups.command(
        *("restore", "--from", str(tmp_path / "backup"), "--data", str(tmp_path / "place")),
        environment={"NIGHTSHIFT_STORE_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/elsewhere"},
    )
    assert said.startswith("restored from ")
    started = tmp_path / "started"
    with running_up(tmp_path / "place", environment=started_to(started)) as up:
        client = client_of(up)
        assert answers(client, ended) == told
        kept = done(client, running)
        assert before <= kept < LINES
        assert answers(client, running) == expected
        # What was done by then is not done again.
        again = {each.line for each in read_started(started) if each.batch_id == running}
        assert len(again) <= LINES - before
        with httpx.Client(base_url=up.url) as http:
            assert http.get("/readyz").status_code == 200
    assert check(tmp_path / "place", deep=True).faults == []


@pytest.mark.timeout(180)
def test_up_refuses_a_directory_that_was_not_put_back_to_the_end(tmp_path: Path) -> None:
    data = tmp_path / "place"
    data.mkdir()
    # What a restore leaves that was killed: see tests/integration/store/test_backup.py.
    (data / UNFINISHED).touch()
    refused = RunningUp(data)
    try:
        assert refused.process.wait(120) == 1
    finally:
        refused.stop()
    assert "run the same `nightshift restore` again" in refused.log_end()
    assert not (data / "nightshift.db").exists()
