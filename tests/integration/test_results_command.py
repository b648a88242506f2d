"""`nightshift results` where a server does not keep its word; `test_up` has the rest."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

BATCH = {
    "id": "batch_1",
    "object": "batch",
    "endpoint": "/v1/chat/completions",
    "input_file_id": "file-1",
    "completion_window": "24h",
    "status": "completed",
    "created_at": 1,
    "output_file_id": "file-2",
}


class _BreaksOff(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        whole = json.dumps(BATCH).encode() if "/batches/" in self.path else b"{}\n" * 9
        sent = whole if "/batches/" in self.path else whole[:5]
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(whole)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    """Return the address of a server whose downloads break off."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _BreaksOff) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def results(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "services.cli.main", "results", "batch_1"),
            *(*arguments, "--base-url", url),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_download_that_breaks_off_is_one_line_and_leaves_no_file(
    url: str, tmp_path: Path
) -> None:
    done = results(url, "--output", str(tmp_path / "answers.jsonl"))
    assert done.returncode == 4, done.stderr
    assert done.stderr.startswith(f"nightshift: the answer of {url} broke off")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [[], ["--follow"]])
def test_a_place_that_cannot_be_is_one_line_and_leaves_no_file(
    url: str, tmp_path: Path, how: list[str]
) -> None:
    (tmp_path / "file").touch()
    places = ["--output", str(tmp_path / "out"), "--errors", str(tmp_path / "file" / "errors")]
    done = results(url, *how, *places)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"nightshift: {tmp_path / 'file' / 'errors'} cannot be written")
    assert len(done.stderr.splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
