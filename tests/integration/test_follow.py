"""`nightshift results --follow` over a running system, whatever dies meanwhile."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import openai
import pytest

from tests.integration.test_up import nightshift, requests
from tests.kit.up import RunningUp, running_up, up

__all__ = ["up"]

pytestmark = [pytest.mark.integration, pytest.mark.slow]


class Following:
    """The command as a process of its own; its lines as they come."""

    def __init__(self, up: RunningUp, batch_id: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "services.cli.main", "results", batch_id, "--follow"),
                *("--base-url", up.base_url, *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.lines: list[str] = []
        self._news: queue.Queue[None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                self.lines.append(json.loads(line)["custom_id"])
                self._news.put(None)

    def wait_lines(self, count: int) -> None:
        """Wait until so many lines have come."""
        while len(self.lines) < count:
            self._news.get(timeout=30)

    def end(self) -> tuple[int, str]:
        """Wait for its end; returns exit status and standard error."""
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            error = stderr.read().decode()
        self._reader.join(30)
        return self.process.wait(30), error


def submitted(up: RunningUp, path: Path, content: bytes) -> str:
    path.write_bytes(content)
    status, out, err = nightshift("submit", str(path), url=up.base_url)
    assert status == 0, err
    return out.strip()


def test_no_line_is_lost_or_repeated_when_store_and_gateway_are_killed(
    up: RunningUp, tmp_path: Path
) -> None:
    lines = 600
    batch_id = submitted(up, tmp_path / "in.jsonl", requests(lines, x_simulate={"delay_ms": 400}))
    following = Following(up, batch_id)
    for wanted, child in ((40, "gateway"), (150, "store"), (300, "gateway"), (400, "store")):
        following.wait_lines(wanted)
        up.wait_restarted(child, up.kill(child))
    status, error = following.end()
    assert status == 0, error
    assert len(following.lines) == lines
    assert set(following.lines) == {f"r{number}" for number in range(lines)}
    client = openai.OpenAI(base_url=up.base_url, api_key="any")
    batch = client.batches.retrieve(batch_id)
    assert batch.output_file_id is not None
    content = client.files.content(batch.output_file_id).text
    assert len(content.splitlines()) == lines


def written(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_files_of_a_batch_that_is_cancelled(tmp_path: Path) -> None:
    with running_up(tmp_path / "data") as up:
        output, errors = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
        batch_id = submitted(
            up,
            tmp_path / "in.jsonl",
            requests(1, temperature=9).replace(b'"r0"', b'"bad"')
            + requests(2)
            + requests(1, x_simulate={"hang": True}).replace(b'"r0"', b'"never"'),
        )
        following = Following(up, batch_id, "--output", str(output), "--errors", str(errors))
        client = openai.OpenAI(base_url=up.base_url, api_key="any")

        def done() -> int:
            counts = client.batches.retrieve(batch_id).request_counts
            return counts.completed + counts.failed if counts else 0

        while done() < 3:
            assert following.process.poll() is None
        assert not output.exists()
        nightshift("cancel", batch_id, url=up.base_url)
        status, error = following.end()
        assert (status, following.lines) == (3, []), error
        assert sorted(written(output)) == ["r0", "r1"]
        assert written(errors) == ["bad", "never"]
        assert list(tmp_path.glob(".*.partial")) == []

        # What has ended is told from its files, in the order of the input.
        def again(*arguments: str) -> tuple[int, Sequence[str], str]:
            status, out, err = nightshift(
                *("results", batch_id, "--follow", *arguments), url=up.base_url
            )
            return status, [json.loads(line)["custom_id"] for line in out.splitlines()], err

        status, told, error = again()
        assert (status, told) == (3, ["r0", "r1"])
        assert "2 line(s) failed" in error
        status, told, error = again("--errors", str(errors))
        assert (status, told, error) == (3, ["r0", "r1"], "")
        assert written(errors) == ["bad", "never"]

        broken = submitted(up, tmp_path / "broken.jsonl", b'{"url":"/v1/chat/completions"}\n')
        status, out, error = nightshift("results", broken, "--follow", url=up.base_url)
        assert (status, out) == (3, "")
        assert "line 1: " in error
        status, _, error = nightshift("results", "batch_none", "--follow", url=up.base_url)
        assert status == 1
        assert "batch_none" in error
    status, _, error = nightshift("results", batch_id, "--follow", url=up.base_url)
    assert status == 4
    assert "no server answers" in error
