"""What services stand on, each to be hit like any other process: brokers, database, blobs."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

import psutil

from tests.kit.nats_cluster import ClusterMember
from tests.kit.nats_server import NatsServer
from tests.kit.postgres import Postgres
from tests.kit.s3_server import S3Server, s3_server

_TRY_SECONDS: Final = 20.0


class Backing(Protocol):
    """One process that a service needs."""

    lasting: bool
    """Whether it finds again what it knew when it was killed."""

    @property
    def port(self) -> int:
        """Where it listens on 127.0.0.1; always the same."""
        ...

    @property
    def pid(self) -> int:
        """Its process id (of the main one, if it has several); of the last one while it is away."""
        ...

    def start(self) -> None:
        """Start it; returns when it takes clients."""
        ...

    def kill(self, *, wipe: bool = False) -> None:
        """End it as a power cut would; with `wipe`, remove what it keeps."""
        ...

    def end(self) -> None:
        """End it for good, running or not."""
        ...


class Broker:
    """One nats-server."""

    lasting = True

    def __init__(self, folder: Path) -> None:
        """Keep its files below `folder`."""
        self._server = NatsServer(folder)
        self.pid = 0

    @property
    def port(self) -> int:
        """See `Backing`."""
        return int(self._server.url.rpartition(":")[2])

    def start(self) -> None:
        """See `Backing`."""
        self._server.start()
        self.pid = self._server.pid

    def kill(self, *, wipe: bool = False) -> None:
        """See `Backing`."""
        self._server.kill()
        if wipe:
            self._server.wipe()

    def end(self) -> None:
        """See `Backing`."""
        self._server.kill()


class Member:
    """One of three nats-servers."""

    lasting = True

    def __init__(self, member: ClusterMember, routes: list[str]) -> None:
        """Take a member that does not run; it finds the others by `routes`."""
        self._member = member
        self._routes = routes
        self.pid = 0

    @property
    def port(self) -> int:
        """See `Backing`."""
        return self._member.port

    def start(self) -> None:
        """See `Backing`."""
        self._member.start(self._routes)
        assert self._member.process is not None
        self.pid = self._member.process.pid
        self._member.wait()

    def kill(self, *, wipe: bool = False) -> None:
        """See `Backing`."""
        self._member.kill()
        if wipe:
            self._member.wipe()

    def end(self) -> None:
        """See `Backing`."""
        self._member.kill()


class Database:
    """A PostgreSQL with one database for the system."""

    lasting = True

    def __init__(self) -> None:
        """Make an empty cluster; nothing runs."""
        self._server = Postgres()
        self._name = ""
        self.pid = 0

    @property
    def port(self) -> int:
        """See `Backing`."""
        return self._server.port

    @property
    def url(self) -> str:
        """Its address without a proxy, for programs such as `doctor`."""
        return self._server.url(self._name)

    def start(self) -> None:
        """See `Backing`."""
        try:
            self._server.start()
        except RuntimeError:
            # Its processes that were killed may hold its memory for a moment still.
            self._server.stop()
            raise
        self.pid = self._server.pid
        self._name = self._name or self._server.new_database().rpartition("/")[2]

    def kill(self, *, wipe: bool = False) -> None:
        """See `Backing`. Its processes end all at once; the next start recovers from its log."""
        assert not wipe, "a database without its data is another one"
        for process in tree(self.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._server.stop()

    def end(self) -> None:
        """See `Backing`."""
        self._server.remove()

    def environment(self, port: int) -> Mapping[str, str]:
        """Return the settings of a store that reaches it at `port`."""
        return {"NIGHTSHIFT_STORE_DATABASE_URL": self._server.url(self._name, port=port)}


class Blobs:
    """An S3 server; what it keeps is in its memory, so that it is never killed but cut off."""

    lasting = False

    def __init__(self, folder: Path) -> None:
        """Log below `folder`."""
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self.server: S3Server | None = None

    @property
    def port(self) -> int:
        """See `Backing`."""
        assert self.server is not None
        return self.server.port

    @property
    def pid(self) -> int:
        """See `Backing`."""
        assert self.server is not None
        return self.server.process.pid

    def start(self) -> None:
        """See `Backing`."""
        self.server = self._stack.enter_context(s3_server(self._folder))

    def kill(self, *, wipe: bool = False) -> None:
        """Refuse: it would forget what was acknowledged."""
        raise NotImplementedError

    def end(self) -> None:
        """See `Backing`."""
        self._stack.close()

    def environment(self, port: int) -> Mapping[str, str]:
        """Return the settings of a store that reaches it at `port`."""
        assert self.server is not None
        return self.server.environment(port)


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all below it; empty where it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


async def freeze(pid: int, seconds: float) -> None:
    """SIGSTOP a process and all below it for a while; others may end them meanwhile."""
    # The handles know a process from a later one with the same number.
    processes = tree(pid)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        await asyncio.sleep(seconds)
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


async def start_again(start: Callable[[], None]) -> None:
    """Start what was killed, in a thread; again where its remains are still in the way."""
    deadline = asyncio.get_running_loop().time() + _TRY_SECONDS
    while True:
        try:
            await asyncio.to_thread(start)
        except RuntimeError:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.2)
        else:
            return
