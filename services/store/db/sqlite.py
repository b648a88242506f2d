"""SQLite: one file, one store, one writer by nature."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.pool import QueuePool

from services.kit.wire.ids import uuid7_hex
from services.store.db.dialect import Head, Mark

BUSY_MS: Final = 3_000
"""How long another process may hold the file's lock before that is a fault."""
_ERASE_SECONDS: Final = 0.1
"""Writers wait while the log is cut, and it waits for readers: not for long."""


class Sqlite:
    """An SQLite file in WAL mode; see `Dialect`."""

    def __init__(self, url: sa.URL, *, durable: bool) -> None:
        """Use the file that `url` names; `durable` syncs each commit."""
        self.holder = uuid7_hex()
        self._path = Path((url.database or "").removeprefix("file:"))
        self.file: Path | None = self._path
        self._url = url
        self._synchronous = "FULL" if durable else "NORMAL"

    def writer(self) -> sa.Engine:
        """See `Dialect`."""
        return self._engine(1, "BEGIN IMMEDIATE")

    def readers(self, size: int) -> sa.Engine:
        """See `Dialect`."""
        return self._engine(size, "BEGIN")

    def _engine(self, size: int, begin: str) -> sa.Engine:
        engine = sa.create_engine(self._url, poolclass=QueuePool, pool_size=size, max_overflow=0)

        @sa.event.listens_for(engine, "connect")
        def prepare(connection: Any, _record: Any) -> None:
            # The driver's own transaction handling loses updates; we say BEGIN ourselves.
            connection.isolation_level = None
            for pragma in (
                # First, since the others may have to wait too.
                f"busy_timeout={BUSY_MS}",
                "journal_mode=WAL",
                f"synchronous={self._synchronous}",
                "foreign_keys=ON",
                # Deleted rows are overwritten, also where their pages become free.
                "secure_delete=ON",
            ):
                connection.execute(f"PRAGMA {pragma}").close()

        @sa.event.listens_for(engine, "begin")
        def start(connection: sa.Connection) -> None:
            connection.exec_driver_sql(begin)

        return engine

    def head(self, connection: sa.Connection) -> Head:
        """See `Dialect`."""
        return Head()

    def mark(self, connection: sa.Connection) -> Mark | None:
        """See `Dialect`: a commit here ends in success or not at all."""
        return None

    def committed(self, connection: sa.Connection, mark: Mark) -> bool | None:
        """See `Dialect`; never asked."""
        return None

    def forget_marks(self, connection: sa.Connection) -> None:
        """See `Dialect`."""

    def others_dead(self, connection: sa.Connection, holder: Any) -> sa.ColumnElement[bool]:
        """See `Dialect`: only one store works on a file, so whoever else held a row is dead."""
        dead: sa.ColumnElement[bool] = holder != self.holder
        return dead

    def pulse(self) -> float | None:
        """See `Dialect`."""
        return None

    def erase(self) -> None:
        """See `Dialect`; the log keeps old pages until it is cut."""
        with contextlib.closing(sqlite3.connect(self._path, _ERASE_SECONDS)) as connection:
            # Its answer says whether somebody was in the way.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()

    def check(self, connection: sa.Connection) -> None:
        """See `Dialect`."""

    def close(self) -> None:
        """See `Dialect`."""
