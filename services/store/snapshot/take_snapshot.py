"""The rows of a store as of one moment, as a SQLite file, taken while it works."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from services.store.db import migrate
from services.store.db.database import Database
from services.store.db.urls import parse_url
from services.store.snapshot import copy_rows

_PAGES: Final = 4_096
"""Pages at once; between two of them it tells how far it is."""


def now_ms(connection: sa.Connection) -> int:
    """Return the database's time, by which every store of it decides."""
    if connection.dialect.name == "sqlite":
        return int(time.time() * 1000)
    asked = sa.text("SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)")
    return int(connection.execute(asked).scalar_one())


def sqlite_file(url: str) -> Path | None:
    """Return the file of a database; None where it is no SQLite.

    Raises:
        SettingsError: it is no URL.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        return None
    return Path(parsed.database)


async def take(db: Database, url: str, to: Path, told: copy_rows.Told) -> None:
    """Write all rows into the new file `to`, as they are at one moment.

    Args:
        db: the database, whose schema is this version's.
        url: its URL.
        to: where nothing is.
        told: called now and then with the number of rows or pages so far.
    """
    file = sqlite_file(url)
    if file is not None:
        await asyncio.to_thread(_copy_pages, file, to, told)
    else:
        # Committed after it was read: the server's transaction need not wait for our disk.
        with opened(to, migrated=True) as target:
            await db.read(lambda source: copy_rows.copy_all(source, target, told))


def _copy_pages(file: Path, to: Path, told: copy_rows.Told) -> None:
    to.touch(mode=0o600)
    reading = f"{file.absolute().as_uri()}?mode=ro"
    with (
        contextlib.closing(sqlite3.connect(reading, uri=True)) as source,
        contextlib.closing(sqlite3.connect(to)) as target,
    ):
        # One snapshot from the first page to the last; what a store commits meanwhile is not in it.
        source.isolation_level = None
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM sqlite_master").fetchone()
        source.backup(
            target, pages=_PAGES, progress=lambda _status, left, total: told(total - left)
        )


@contextlib.contextmanager
def opened(file: Path, *, migrated: bool = False) -> Iterator[sa.Connection]:
    """Open a SQLite file that nobody else uses, in a transaction; nothing is left beside it after.

    Args:
        file: the database; only its owner can read it.
        migrated: whether to bring its schema to this version first, from nothing if need be.
    """
    engine = sa.create_engine(f"sqlite:///{file}")

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        # References are checked by whoever checks the copy; rows come table by table.
        for pragma in ("foreign_keys=OFF", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}").close()

    @sa.event.listens_for(engine, "begin")
    def start(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    try:
        file.touch(mode=0o600)
        if migrated:
            migrate.upgrade(engine, int(time.time()))
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()
