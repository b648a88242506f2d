"""A real nats-server with JetStream, on a free port and with a store directory of its own."""

import json
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.kit.ports import free_port

START_SECONDS: Final = 10.0
STOP_SECONDS: Final = 5.0


def refuses_strangers(address: str) -> bool:
    """Tell whether a server at `host:port` turns a client without a password away."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), START_SECONDS) as connection:
        connection.sendall(b"CONNECT {}\r\nPING\r\n")
        answer = b""
        while piece := connection.recv(65_536):
            answer += piece
            if b"PONG" in answer:
                return False
    return b"Authorization Violation" in answer


class NatsServer:
    """One nats-server process; started again it keeps its port and its store."""

    def __init__(self, folder: Path, *more: str) -> None:
        """Keep store, log and port file below `folder`; runs nothing until `start`.

        `more` are arguments of the server.
        """
        self._folder = folder
        self._more = more
        self._process: subprocess.Popen[bytes] | None = None
        self._port = free_port()

    @property
    def url(self) -> str:
        """Return where it listens; the same after a restart."""
        return f"nats://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Return the process's id."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it takes clients.

        Raises:
            RuntimeError: it ended, or takes no clients after `START_SECONDS`; carries its log.
        """
        assert self._process is None, "already running"
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / "nats.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    str(Path(sysconfig.get_path("scripts")) / "nats-server"),
                    *("--addr", "127.0.0.1", "--port", str(self._port)),
                    *("--jetstream", "--store_dir", str(self._folder / "store")),
                    *("--ports_file_dir", str(self._folder)),
                    *self._more,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        # Written when it takes clients.
        ports = self._folder / f"nats-server_{self._process.pid}.ports"
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                json.loads(ports.read_text())
            except (OSError, ValueError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"nats-server did not start: {log.read_text()}") from None
                time.sleep(0.005)
            else:
                return

    def kill(self) -> None:
        """End it as a power cut would (SIGKILL); does nothing when it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def wipe(self) -> None:
        """Remove all that it stored; it must not be running."""
        assert self._process is None, "still running"
        shutil.rmtree(self._folder / "store")

    def save(self, to: Path) -> None:
        """Copy all that it stored to a new folder; it must not be running."""
        assert self._process is None, "still running"
        shutil.copytree(self._folder / "store", to)

    def put_back(self, saved: Path) -> None:
        """Let it have stored what `save` copied, and nothing since; it must not be running."""
        self.wipe()
        shutil.copytree(saved, self._folder / "store")

    def stop(self) -> None:
        """End it in order, or by SIGKILL after `STOP_SECONDS`."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """Run a nats-server for one test."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()
