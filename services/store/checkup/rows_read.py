"""The store's database and blobs, to be looked at and never changed."""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from services.store.blobs.reader import BlobReader


class MovedError(Exception):
    """A store began to work on a database that was taken to lie still: look again."""


class View:
    """A store's data, whether a store works on it or not.

    Attributes:
        blobs: what its rows name.
        is_copy: whether the file is a copy, made for this, of the rows of a PostgreSQL.
    """

    def __init__(self, database: Path, blobs: BlobReader, *, is_copy: bool = False) -> None:
        """Look at a database file and a place of blobs.

        Raises:
            sa.exc.DatabaseError: it cannot be opened.
        """
        self.blobs = blobs
        self.is_copy = is_copy
        self._database = database
        self._wal = database.with_name(f"{database.name}-wal")
        # A database in WAL mode that nobody has open lacks this file, and to open it as usual would
        # make one. Whoever opens it later to write makes one too, which `check_still` looks for.
        self._still = not self._wal.exists()
        self._before = self._stamp()
        self._engine = sa.create_engine("sqlite://", creator=self._connect, poolclass=StaticPool)

        @sa.event.listens_for(self._engine, "begin")
        def start(connection: sa.Connection) -> None:
            connection.exec_driver_sql("BEGIN")

    def _connect(self) -> sqlite3.Connection:
        mode = "immutable=1" if self._still else "mode=ro"
        connection = sqlite3.connect(f"{self._database.absolute().as_uri()}?{mode}", uri=True)
        # The driver's own transaction handling would not give us one snapshot.
        connection.isolation_level = None
        for pragma in ("query_only=ON", "busy_timeout=5000"):
            connection.execute(f"PRAGMA {pragma}").close()
        return connection

    def _stamp(self) -> tuple[int, int]:
        found = self._database.stat()
        return found.st_mtime_ns, found.st_size

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sa.Connection]:
        """Yield a connection on which everything is read as of one moment; keep it short."""
        with self._engine.connect() as connection, connection.begin():
            yield connection

    def check_still(self) -> None:
        """Make sure that what was read is what was there.

        Raises:
            MovedError: it was read as lying still, and did not.
        """
        if self._still and (self._wal.exists() or self._stamp() != self._before):
            raise MovedError

    def close(self) -> None:
        """Close the database."""
        self._engine.dispose()

    # --- blobs --------------------------------------------------------------------------------

    def read_span(self, parts: Sequence[tuple[str, int]], offset: int, length: int) -> bytes:
        """Return bytes of a file that is a list of (blob, bytes); fewer where it ends before."""
        pieces = []
        start = 0
        for name, size in parts:
            if length > 0 and offset < start + size:
                piece = self.blobs.read(name, offset - start, min(length, start + size - offset))
                pieces.append(piece)
                offset += len(piece)
                length -= len(piece)
            start += size
        return b"".join(pieces)

    def pieces(self, parts: Sequence[tuple[str, int]], size: int) -> Iterator[bytes]:
        """Yield a file's content in pieces of `size` bytes at most."""
        for name, whole in parts:
            for offset in range(0, whole, size):
                yield self.blobs.read(name, offset, min(size, whole - offset))
