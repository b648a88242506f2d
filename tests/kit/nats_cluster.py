"""Three real nats-servers that form one cluster, each with a store directory of its own."""

import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.kit.ports import free_port

START_SECONDS: Final = 20.0
STOP_SECONDS: Final = 5.0
NAME: Final = "nightshift-test"


class ClusterMember:
    """One server of a cluster; started again it keeps its ports and its store."""

    def __init__(
        self, folder: Path, name: str, port: int, route_port: int, *, advertise: bool = True
    ) -> None:
        """Keep all below `folder`; runs nothing until `start`.

        Without `advertise` clients are not told of the other servers, and use what they were given.
        """
        self._folder = folder
        self._name = name
        self._port = port
        self._frozen = False
        self._more = () if advertise else ("--no_advertise",)
        self.route = f"nats://127.0.0.1:{route_port}"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Return the port on which it takes clients."""
        return self._port

    @property
    def url(self) -> str:
        """Return where it takes clients."""
        return f"nats://127.0.0.1:{self._port}"

    def start(self, routes: list[str]) -> None:
        """Start it; it finds the others by `routes`."""
        assert self.process is None, "already running"
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "nats.log").open("ab") as output:
            self.process = subprocess.Popen(
                [
                    str(Path(sysconfig.get_path("scripts")) / "nats-server"),
                    *("--addr", "127.0.0.1", "--port", str(self._port)),
                    *("--name", self._name, "--cluster_name", NAME, "--cluster", self.route),
                    *("--routes", ",".join(routes)),
                    *("--jetstream", "--store_dir", str(self._folder / "store")),
                    *self._more,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        """Wait until it takes clients. RuntimeError, with its log, where it does not in time."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
            except OSError:
                assert self.process is not None
                if self.process.poll() is not None or time.monotonic() > deadline:
                    log = (self._folder / "nats.log").read_text()
                    raise RuntimeError(f"{self._name} did not start: {log}") from None
                time.sleep(0.01)
            else:
                return

    def freeze(self) -> None:
        """Stop it where it is (SIGSTOP): its connections stay and nothing is answered."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        self._frozen = True

    def thaw(self) -> None:
        """Let it go on."""
        if self.process is not None and self._frozen:
            os.kill(self.process.pid, signal.SIGCONT)
        self._frozen = False

    def kill(self) -> None:
        """End it as a power cut would (SIGKILL); does nothing when it is not running."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process, self._frozen = None, False

    def stop(self) -> None:
        """End it in order, or by SIGKILL after `STOP_SECONDS`."""
        if self.process is None:
            return
        self.thaw()
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def wipe(self) -> None:
        """Remove all that it stored; it must not be running."""
        assert self.process is None, "still running"
        shutil.rmtree(self._folder / "store", ignore_errors=True)


class NatsCluster:
    """Three servers; any one of them may be gone and all goes on."""

    def __init__(self, folder: Path, *, advertise: bool = True) -> None:
        """Keep each server's files below `folder`; runs nothing until `start`."""
        ports = [free_port() for _ in range(6)]
        self.members = [
            ClusterMember(
                folder / f"n{number}",
                f"n{number}",
                ports[number],
                ports[3 + number],
                advertise=advertise,
            )
            for number in range(3)
        ]

    @property
    def url(self) -> str:
        """Return all addresses, as `NIGHTSHIFT_NATS_URL` takes them."""
        return ",".join(member.url for member in self.members)

    def start(self, *numbers: int) -> None:
        """Start these, or all, and wait until they take clients; a leader is found after that."""
        chosen = [self.members[number] for number in numbers or range(3)]
        routes = [member.route for member in self.members]
        for member in chosen:
            member.start(routes)
        for member in chosen:
            member.wait()

    def restart(self, number: int) -> None:
        """Start one again that was killed or stopped."""
        self.start(number)

    def stop(self) -> None:
        """End all."""
        for member in self.members:
            # Nothing of a test's cluster is wanted any more.
            member.kill()


@pytest.fixture
def nats_cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    """Run three servers for one test."""
    cluster = NatsCluster(tmp_path / "nats")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
