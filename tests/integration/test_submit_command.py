"""`nightshift submit` where the answer to a request is lost; `test_up` has the rest."""

import json
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'
ANSWERS = {
    "/v1/files": {"id": "file-1", "object": "file", "bytes": len(LINE), "purpose": "batch"},
    "/v1/batches": {"id": "batch_1", "object": "batch", "status": "validating"},
}


class _Forgetful(ThreadingHTTPServer):
    """Takes each request, and answers none the first time."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.taken: dict[str, list[tuple[str, bytes]]] = defaultdict(list)
        """By path: the key under which each request came, and its body."""


class _Handler(BaseHTTPRequestHandler):
    server: _Forgetful

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        taken = self.server.taken[self.path]
        taken.append((self.headers.get("idempotency-key", ""), body))
        if len(taken) == 1:
            self.close_connection = True
            return
        answer = json.dumps(ANSWERS[self.path]).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[_Forgetful]:
    with _Forgetful() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_what_is_sent_again_is_known_as_the_same(server: _Forgetful, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(LINE)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "services.cli.main", "submit", str(file)),
            *("--base-url", f"http://127.0.0.1:{server.server_port}/v1"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "batch_1\n", done.stderr
    assert all(LINE in body for _, body in server.taken["/v1/files"])
    keys = [[key for key, _ in server.taken[path]] for path in ANSWERS]
    # One for each thing that is made, whatever answer is lost.
    assert all(one == again != "" for one, again in keys)
    assert len({one for one, _ in keys}) == 2
