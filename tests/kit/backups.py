"""Backups as they are taken and put back: by the command, or by the process that it starts."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from services.store.backup import restore
from services.store.backup import take as backup
from services.store.backup.target import Facts
from services.store.db.database import Database
from services.store.settings import StoreSettings
from services.store.tables.core import metadata

SECONDS: Final = 120.0

Place = Path | Mapping[str, str]
"""A data directory, or the settings that say where database and blobs are."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended. `said`: its last line, parsed; empty where it was killed."""

    status: int
    said: dict[str, Any]
    errors: str

    @property
    def why(self) -> str:
        """Why it could not be done."""
        return str(self.said["why"])


def settings_of(place: Place) -> dict[str, str]:
    """Return a place as the store's settings."""
    return {"NIGHTSHIFT_STORE_DATA_DIR": str(place)} if isinstance(place, Path) else dict(place)


def take(place: Place, to: Path, *arguments: str, failpoint: str = "") -> Ended:
    """Back up, dying or stopping where `failpoint` says."""
    return end(begin(place, "take", "--to", str(to), *arguments, failpoint=failpoint))


def put_back(source: Path, place: Place, *, failpoint: str = "") -> Ended:
    """Restore, dying or stopping where `failpoint` says."""
    return end(begin(place, "restore", "--from", str(source), failpoint=failpoint))


async def take_here(data: Path, to: Path, reuse: Path | None = None) -> Facts:
    """Back a data directory up in this process, which saves the start of another."""
    return await backup.take(StoreSettings(data_dir=data), to, reuse, lambda _said: None)


async def put_back_here(source: Path, data: Path, *, with_faults: bool = False) -> Facts:
    """Restore into a data directory in this process."""
    return await restore.restore(
        source, StoreSettings(data_dir=data), lambda _said: None, with_faults=with_faults
    )


def begin(place: Place, *arguments: str, failpoint: str = "") -> "subprocess.Popen[bytes]":
    """Start the process, whose end `end` waits for."""
    return subprocess.Popen(
        [sys.executable, "-m", "services.store.backup", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **settings_of(place), "NIGHTSHIFT_FAILPOINTS": failpoint},
    )


def end(process: "subprocess.Popen[bytes]") -> Ended:
    """Wait for its end."""
    try:
        output, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    lines = output.splitlines()
    return Ended(
        process.returncode, json.loads(lines[-1]) if lines else {}, errors.decode(errors="replace")
    )


def command(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run `nightshift` and return its standard output. AssertionError where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def all_rows(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row of a store's database by table, in an order of its own."""
    found = {}
    database = Database(url)
    try:

        def read(connection: sa.Connection) -> None:
            for table in metadata.sorted_tables:
                rows = connection.execute(sa.select(table)).all()
                found[table.name] = sorted((tuple(row) for row in rows), key=repr)

        database.run(read)
    finally:
        database.close()
    return found
