"""The system under measurement: `nightshift up` on a folder of its own, and a light client."""

import contextlib
import http.client
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from tests.kit.up import SIMULATED, RunningUp

Json: TypeAlias = dict[str, Any]

CHAT: Final = "/v1/chat/completions"
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})

_BOUNDARY: Final = "nightshift-benchmark"
_TIMEOUT_SECONDS: Final = 300.0
# Servers, and what stands before them, close connections that nobody uses.
_KEPT_SECONDS: Final = 2.0
_SEND_BYTES: Final = 1024 * 1024


class Refused(Exception):
    """The system answered with an error; the message is the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A batch as it ended, and when what was first seen; seconds of the monotonic clock.

    Attributes:
        batch: the last answer.
        first_progress_at: a line was done.
        all_done_at: every line was done.
        ended_at: it was in an end state.
    """

    batch: Json
    first_progress_at: float
    all_done_at: float
    ended_at: float


class Api:
    """A REST client over one kept connection.

    The official client takes more CPU for a call than the services do; where latency or the
    pipeline is measured on the same two cores, that would be measured instead.
    """

    def __init__(self, url: str, key: str = "") -> None:
        """Talk to `http://HOST:PORT`, with an API key where there is one."""
        self.url = url
        self.key = key
        self._address = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_SECONDS)
        self._used_at = 0.0

    def call(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Make one call and return its body.

        Raises:
            Refused: status 400 or above.
            OSError, http.client.HTTPException: nobody answers; the next call connects anew.
        """
        if time.monotonic() > self._used_at + _KEPT_SECONDS:
            self._connection.close()
        sent = dict(headers or {})
        if self.key:
            sent["Authorization"] = f"Bearer {self.key}"
        try:
            self._connection.request(method, path, body=body, headers=sent)
            response = self._connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise
        self._used_at = time.monotonic()
        if response.status >= 400:
            raise Refused(f"{method} {path}: {response.status} {answer[:300]!r}")
        return answer

    def get(self, path: str) -> Json:
        """Return the object at `path`."""
        found: Json = json.loads(self.call("GET", path))
        return found

    def post(self, path: str, body: Json | None = None) -> Json:
        """Post an object and return the answer."""
        data = json.dumps(body or {}).encode()
        found: Json = json.loads(
            self.call("POST", path, data, {"Content-Type": "application/json"})
        )
        return found

    def upload(self, data: bytes) -> str:
        """Upload a batch's input; returns the file's id."""
        head = (
            f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; '
            f'filename="input.jsonl"\r\nContent-Type: application/jsonl\r\n\r\n'
        ).encode()
        tail = f"\r\n--{_BOUNDARY}--\r\n".encode()
        pieces = (data[at : at + _SEND_BYTES] for at in range(0, len(data), _SEND_BYTES))
        parts = itertools.chain((head,), pieces, (tail,))
        headers = {
            "Content-Type": f"multipart/form-data; boundary={_BOUNDARY}",
            "Content-Length": str(len(head) + len(data) + len(tail)),
        }
        identifier: str = json.loads(self.call("POST", "/v1/files", parts, headers))["id"]
        return identifier

    def create(self, file_id: str, endpoint: str = CHAT) -> Json:
        """Create a batch."""
        return self.post(
            "/v1/batches",
            {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"},
        )

    def batch(self, batch_id: str) -> Json:
        """Return a batch as it is now."""
        return self.get(f"/v1/batches/{batch_id}")

    def follow(self, batch_id: str, *, every_seconds: float, within_seconds: float = 600.0) -> Seen:
        """Poll until the batch ended.

        Raises:
            TimeoutError: it did not in time.
        """
        deadline = time.monotonic() + within_seconds
        first = all_done = 0.0
        while True:
            batch = self.batch(batch_id)
            now = time.monotonic()
            counts = batch.get("request_counts") or {}
            done = counts.get("completed", 0) + counts.get("failed", 0)
            if done and not first:
                first = now
            if done and done == counts.get("total") and not all_done:
                all_done = now
            if batch["status"] in ENDED:
                return Seen(
                    batch=batch, first_progress_at=first, all_done_at=all_done, ended_at=now
                )
            if now > deadline:
                raise TimeoutError(f"not ended after {within_seconds:.0f} s: {batch}")
            time.sleep(every_seconds)

    def content(self, file_id: str) -> bytes:
        """Return a file's bytes."""
        return self.call("GET", f"/v1/files/{file_id}/content")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class System:
    """One running `nightshift up`."""

    def __init__(self, up: RunningUp) -> None:
        """Wrap a tree that is ready."""
        self.up = up
        self.api = Api(up.url)

    def pids(self) -> dict[str, int]:
        """Return every process of ours by name, `up` itself included."""
        return {**self.up.pids(), "up": self.up.process.pid}

    def wait_serving(self, model_lines: bytes, within_seconds: float) -> None:
        """Run a small batch, so that engines are loaded and every path was taken once."""
        batch = self.api.create(self.api.upload(model_lines))
        seen = self.api.follow(batch["id"], every_seconds=0.05, within_seconds=within_seconds)
        require_completed(seen.batch)


def require_completed(batch: Json) -> None:
    """Refuse to report a figure of a batch that did not do all its lines.

    Raises:
        Refused: it is not completed, or a line failed.
    """
    counts = batch["request_counts"]
    if batch["status"] != "completed" or counts["completed"] != counts["total"]:
        raise Refused(f"batch ended as {batch['status']} with {counts}: {batch.get('errors')}")


@contextlib.contextmanager
def running(
    arguments: Sequence[str] = SIMULATED, environment: Mapping[str, str] | None = None
) -> Iterator[System]:
    """Run `nightshift up` on a fresh folder until the block ends; its log is shown on a fault."""
    with fresh_folder() as folder, running_on(folder / "data", arguments, environment) as system:
        yield system


@contextlib.contextmanager
def fresh_folder() -> Iterator[Path]:
    """Make a folder for a data directory and its log; it is gone when the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="nightshift-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running_on(
    data: Path, arguments: Sequence[str] = SIMULATED, environment: Mapping[str, str] | None = None
) -> Iterator[System]:
    """Run `nightshift up` on a data directory, which stays, until the block ends."""
    up = None
    try:
        up = RunningUp(data, arguments, environment)
        up.wait_ready()
        system = System(up)
        yield system
        system.api.close()
    except Exception:
        if up is not None:
            print(up.log_end(3_000), file=sys.stderr)
        raise
    finally:
        if up is not None:
            up.stop()


def simulated_lines(
    count: int,
    *,
    first: int = 0,
    size_bytes: int = 0,
    simulate: Json | None = None,
    model: str = "simulated",
) -> bytes:
    """Return `count` lines for the simulated engine.

    Args:
        count: how many.
        first: number of the first of them.
        size_bytes: how long each is with its newline; 0 leaves it short.
        simulate: the body's `x_simulate`.
        model: the model's name.
    """
    body: Json = {"model": model, "max_tokens": 16}
    if simulate is not None:
        body["x_simulate"] = simulate
    body["messages"] = [{"role": "user", "content": "@"}]
    line = json.dumps(
        {"custom_id": "request-0000000", "method": "POST", "url": CHAT, "body": body},
        separators=(",", ":"),
    )
    # The "@" gives way to a blank and seven digits, and a newline follows.
    missing = max(size_bytes - len(line) - 8, 0)
    text = ("x y z w " * (missing // 8 + 1))[:missing]
    before, after = line.replace("@", f"{text} @").split("@")
    start, middle = before.split("request-0000000")
    return "".join(
        f"{start}request-{i:07d}{middle}{i:07d}{after}\n" for i in range(first, first + count)
    ).encode()
