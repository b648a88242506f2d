"""`nightshift doctor` as an operator runs it."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from tests.kit.data_at_rest import make
from tests.kit.store import chat_line
from tests.kit.up import running_up, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "services.cli.main", "doctor", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, **environment},
    )


def facts(*arguments: str, **environment: str) -> dict[str, Any]:
    """Return what it says of this machine, by name."""
    done = run("--json", *arguments, **environment)
    said = json.loads(done.stdout)
    assert done.returncode == (0 if said["ok"] else 1)
    return {fact["name"]: fact for fact in said["facts"]}


def test_it_says_what_is_so_here(tmp_path: Path) -> None:
    found = facts("--data", str(tmp_path / "new"), CUDA_VISIBLE_DEVICES="")
    assert f"Python {sys.version.split()[0]}" in found["versions"]["text"]
    assert found["nats-server"]["text"].startswith("v2.")
    assert found["gpu"]["is_well"] is None
    assert "CUDA_VISIBLE_DEVICES" in found["gpu"]["text"]
    assert found["gpu"]["mend"]
    assert found["data"]["text"].endswith("is not there yet; `up` makes it")
    assert "GiB are free" in found["disk"]["text"]
    assert not (tmp_path / "new").exists()


def test_a_taken_port_is_at_fault_and_says_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        done = run("--data", str(tmp_path), "--listen", listen)
    assert done.returncode == 1
    assert f"{listen} is in use by another program" in done.stdout
    assert "choose another address with --listen" in done.stdout


def test_options_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    done = run("--listen", "nowhere")
    assert done.returncode == 2
    assert "--listen takes HOST:PORT" in done.stderr
    done = run("--check", "--data", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "name the directory of `nightshift up` with --data" in done.stderr
    done = run("--check", "--data", str(tmp_path), "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]
    done = run("--check", "--data", str(tmp_path), NIGHTSHIFT_STORE_NONSENSE="1")
    assert done.returncode == 2
    assert "unknown setting NIGHTSHIFT_STORE_NONSENSE" in done.stderr


def test_faults_are_shown_with_their_mends(tmp_path: Path) -> None:
    data = asyncio.run(make(tmp_path / "data"))
    data.sql("UPDATE batches SET completed = 0 WHERE id = ?", data.open_batch)
    (data.root / "blobs" / "default" / "lost").write_bytes(b"x")

    done = run("--check", "--data", str(data.root))
    assert done.returncode == 1
    assert f"\n✗ {data.open_batch}: completed is 0; its results come to 5\n" in done.stdout
    assert f"statement: UPDATE batches SET completed = 5 WHERE id = '{data.open_batch}'\n" in (
        done.stdout
    )
    assert "\n✗ blobs/default/lost: is a file that no row knows" in done.stdout
    assert done.stdout.endswith("\n2 faults\n")

    done = run("--check", "--data", str(data.root), "--json")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert not said["ok"]
    assert sorted((fault["kind"], bool(fault["mend"])) for fault in said["faults"]) == [
        ("blobs", True),
        ("results", True),
    ]
    assert {kind["kind"]: kind["faults"] for kind in said["kinds"]}["results"] == 1


@pytest.mark.timeout(180)
def test_all_is_well_while_it_runs_and_after_it_was_stopped(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    lines = b"".join(
        chat_line(f"r{number}", x_simulate={"delay_ms": 50 * (number % 3)})
        for number in range(1_500)
    )
    with running_up(tmp_path / "data") as up:
        client = openai.OpenAI(base_url=up.base_url, api_key="none")
        file = client.files.create(file=("input.jsonl", lines), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        def done() -> int:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts.completed if counts else 0

        wait_until(lambda: done() >= 100, 30, "the batch runs")
        checked = run("--check", "--deep", "--data", data)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert checked.stdout.endswith("\nall is well\n")

        here = facts("--data", data)
        assert f"in use by `nightshift up`, process {up.process.pid}" in here["data"]["text"]
        assert here["rest"]["text"] == f"{up.url.removeprefix('http://')} answers"
        assert here["grpc"]["text"] == f"{up.grpc} answers"

        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 60, "its end")
        checked = run("--check", "--deep", "--data", data)
        assert checked.returncode == 0, checked.stdout + checked.stderr
    checked = run("--check", "--deep", "--data", data, "--json")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    kinds = {kind["kind"]: kind["counts"] for kind in orjson.loads(checked.stdout)["kinds"]}
    assert kinds["ended batches"] == {"completed": 1, "lines read": 1_500}
    assert "is not in use" in facts("--data", data)["data"]["text"]
