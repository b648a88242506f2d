"""The store's database and blobs, to be looked at and never changed."""

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}/[a-z]{1,32}/[0-9a-f]{32}")
_UNFINISHED: Final = "tmp"


class MovedError(Exception):
    """A store began to work on a database that was taken to lie still: look again."""


class View:
    """A store's data, whether a store works on it or not.

    Attributes:
        folder: where the blobs are.
    """

    def __init__(self, database: Path, folder: Path) -> None:
        """Look at a database file and a folder of blobs.

        Raises:
            sa.exc.DatabaseError: it cannot be opened.
        """
        self.folder = folder
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

    def is_name(self, name: Any) -> bool:
        """Tell whether a blob can have this name; a damaged row may hold anything."""
        return isinstance(name, str) and _NAME.fullmatch(name) is not None

    def size(self, name: str) -> int | None:
        """Return a blob's size in bytes; None where there is no such file."""
        try:
            return (self.folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes of a blob from `offset`.

        Raises:
            FileNotFoundError: there is no such file.
        """
        descriptor = os.open(self.folder / name, os.O_RDONLY)
        try:
            pieces = []
            while length > 0 and (piece := os.pread(descriptor, length, offset)):
                pieces.append(piece)
                offset += len(piece)
                length -= len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        finally:
            os.close(descriptor)

    def read_span(self, parts: Sequence[tuple[str, int]], offset: int, length: int) -> bytes:
        """Return bytes of a file that is a list of (blob, bytes); fewer where it ends before."""
        pieces = []
        start = 0
        for name, size in parts:
            if length > 0 and offset < start + size:
                piece = self.read(name, offset - start, min(length, start + size - offset))
                pieces.append(piece)
                offset += len(piece)
                length -= len(piece)
            start += size
        return b"".join(pieces)

    def pieces(self, parts: Sequence[tuple[str, int]], size: int) -> Iterator[bytes]:
        """Yield a file's content in pieces of `size` bytes at most."""
        for name, whole in parts:
            for offset in range(0, whole, size):
                yield self.read(name, offset, min(size, whole - offset))

    def names(self) -> Iterator[tuple[str, int]]:
        """Yield name and size in bytes of every file that was written whole, in no order."""
        yield from self._below(self.folder, "")

    def _below(self, folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                name = f"{prefix}{entry.name}"
                if name == _UNFINISHED:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from self._below(folder / entry.name, f"{name}/")
                    continue
                # It may go while we look: then it is none of those that are there.
                with contextlib.suppress(FileNotFoundError):
                    yield name, entry.stat(follow_symlinks=False).st_size

    def unfinished(self) -> int:
        """Return how many files are being written, or were when a store was killed."""
        with contextlib.suppress(FileNotFoundError):
            return sum(1 for _ in (self.folder / _UNFINISHED).iterdir())
        return 0
