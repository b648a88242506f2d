"""`nightshift up` as a user starts it: a real process tree on free ports, ended after the test."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import psutil
import pytest

READY_SECONDS: Final = 60.0
STOP_SECONDS: Final = 60.0

SIMULATED: Final = ("--engine", "simulated")


def is_running(pid: int) -> bool:
    """Tell whether a process exists and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(
    condition: Callable[[], object], within_seconds: float = 10.0, what: str = "condition"
) -> None:
    """Poll until `condition` holds; AssertionError where it does not in time."""
    deadline = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {within_seconds} s: {what}"
        time.sleep(0.005)


class RunningUp:
    """One `nightshift up`. Its log is a file beside the data directory."""

    def __init__(
        self,
        data: Path,
        arguments: Sequence[str] = SIMULATED,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; `wait_ready` says when batches can be taken.

        Args:
            data: its data directory; the log goes to a file named like it plus `.log`.
            arguments: engine, models and the like; `--data` and `--listen` are added.
            environment: variables to set on top of ours.
        """
        self.data = data
        self.log = data.with_name(f"{data.name}.log")
        self.url = ""
        """REST address without a path, `http://127.0.0.1:PORT`."""
        self.grpc = ""
        """gRPC address, `127.0.0.1:PORT`."""
        self.seconds_to_ready = 0.0
        self._began = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "services.cli.main", "up"),
                    *("--data", str(data), "--listen", "127.0.0.1:0", *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {})},
            )
        assert self.process.stdout is not None
        self.stdout: list[str] = []
        """All lines of standard output so far."""
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    def broker(self) -> dict[str, str]:
        """Return what a NATS client connects with to see and do everything."""
        addresses = json.loads((self.data / "addresses.json").read_text())
        password = (self.data / "nats-passwords" / "operator").read_text().strip()
        return {
            "servers": f"nats://{addresses['nats']}",
            "user": "operator",
            "password": password,
        }

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes, `http://127.0.0.1:PORT/v1`."""
        return f"{self.url}/v1"

    def _read(self, stdout: IO[bytes]) -> None:
        with stdout:
            for line in stdout:
                text = line.decode().rstrip("\n")
                self.stdout.append(text)
                self._lines.put(text)
        self._lines.put(None)

    def wait_ready(self) -> None:
        """Read `ready:` and `grpc:`. AssertionError with the log's end where they do not come."""
        self.url = self._line("ready: ")
        self.seconds_to_ready = time.monotonic() - self._began
        self.grpc = self._line("grpc: ")

    def _line(self, start: str) -> str:
        left = READY_SECONDS - (time.monotonic() - self._began)
        try:
            line = self._lines.get(timeout=max(left, 0.1))
        except queue.Empty:
            line = None
        line = line or ""
        assert line.startswith(start), f"{line!r}; log:\n{self.log_end()}"
        return line.removeprefix(start)

    def log_end(self, size: int = 6_000) -> str:
        """Return the last `size` characters of the log."""
        return self.log.read_text(errors="replace")[-size:]

    def pids(self) -> dict[str, int]:
        """Return what `DIR/run` says: child (`store`, `executor-0`, …) → process id."""
        found = {}
        for file in (self.data / "run").glob("*.pid"):
            # One may go between the listing and the reading.
            with contextlib.suppress(FileNotFoundError):
                found[file.stem] = int(file.read_text())
        return found

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a child a signal; returns its process id."""
        pid = self.pids()[name]
        os.kill(pid, number)
        return pid

    def wait_restarted(self, name: str, old_pid: int, within_seconds: float = 10.0) -> int:
        """Wait until a child runs as another process; returns the new process id."""
        wait_until(
            lambda: self.pids().get(name, old_pid) != old_pid, within_seconds, f"{name} restarted"
        )
        return self.pids()[name]

    def tree(self) -> list[int]:
        """Return the ids of all processes below this one, children's children included."""
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Have it drain and end; returns its exit status. SIGKILL after `STOP_SECONDS`."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(
                f"did not stop in {STOP_SECONDS} s; log:\n{self.log_end()}"
            ) from None
        finally:
            self._reader.join(STOP_SECONDS)


@contextlib.contextmanager
def running_up(
    data: Path,
    arguments: Sequence[str] = SIMULATED,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningUp]:
    """Run `nightshift up` until the block ends; yields it once it is ready."""
    running = RunningUp(data, arguments, environment)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


@pytest.fixture
def up(tmp_path: Path) -> Iterator[RunningUp]:
    """Run `nightshift up --engine simulated` for one test."""
    with running_up(tmp_path / "data") as running:
        yield running
