"""The directory of a backup: what makes it one, and whether it is whole.

It is a data directory, `nightshift.db` and `blobs/`, with one file more. While it is being made
that file is called `backup.unfinished`, and its last step renames it to `backup.json`.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import orjson

from services.kit import fsync

FORMAT: Final = 1
DATABASE: Final = "nightshift.db"
BLOBS: Final = "blobs"
_WHOLE: Final = "backup.json"
_UNFINISHED: Final = "backup.unfinished"


class BackupError(Exception):
    """A backup cannot be made or put back; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a whole backup says of itself.

    Attributes:
        format: of the directory; a reader refuses a higher one.
        schema: revision of the database's tables.
        version: of Nightshift, that made it.
        taken_at: Unix seconds of the moment that it shows.
        rows: in all tables.
        blobs: how many, of `bytes` in all.
        database_sha256: in hex, of `nightshift.db`.
        missing: names of blobs that the store itself had lost, or a piece of them.
    """

    format: int
    schema: str
    version: str
    taken_at: int
    rows: int
    blobs: int
    bytes: int
    database_sha256: str
    missing: tuple[str, ...] = ()


class Place:
    """A directory that is or is to be a backup; every name in it is ours."""

    def __init__(self, root: Path) -> None:
        """Name the directory; nothing is made yet."""
        self.root = root.absolute()
        self.database = self.root / DATABASE
        self.blobs = self.root / BLOBS

    # --- making -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def being_made(self) -> Iterator[None]:
        """Make the directory, or go on with one that was not finished; nobody else may meanwhile.

        Raises:
            BackupError: it holds something else, or another backup is being made there.
        """
        self._refuse_used()
        fsync.make(self.root.parent)
        self.root.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(self.root / _UNFINISHED, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BackupError(f"another backup is being made at {self.root}") from None
            # The snapshot is taken anew; blobs never change, so that those that are there stay.
            for name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal"):
                (self.root / name).unlink(missing_ok=True)
            fsync.sync(self.root)
            yield
        finally:
            os.close(descriptor)

    def _refuse_used(self) -> None:
        if (self.root / _WHOLE).exists():
            raise BackupError(
                f"{self.root} is a whole backup already: name another directory, and this one with "
                "--reuse, so that blobs which it has are not copied again"
            )
        if (self.root / _UNFINISHED).exists():
            return
        if self.root.exists() and not (self.root.is_dir() and not any(self.root.iterdir())):
            raise BackupError(f"{self.root} is not empty: name a directory that is to be made")

    def finish(self, facts: Facts) -> None:
        """Have everything on disk, then make it whole."""
        sync_tree(self.blobs)
        fsync.sync(self.database)
        file = self.root / _UNFINISHED
        file.write_bytes(orjson.dumps(asdict(facts), option=orjson.OPT_INDENT_2) + b"\n")
        fsync.sync(file)
        fsync.sync(self.root)
        file.rename(self.root / _WHOLE)
        fsync.sync(self.root)
        fsync.sync(self.root.parent)

    # --- reading ----------------------------------------------------------------------------------

    def facts(self) -> Facts:
        """Return what it says of itself.

        Raises:
            BackupError: it is no backup, not whole, or was changed since.
        """
        try:
            said = orjson.loads((self.root / _WHOLE).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise BackupError(self._why_not_whole()) from None
        except ValueError:
            raise self._damaged() from None
        if said.get("format") != FORMAT:
            raise BackupError(
                f"{self.root} is a backup of format {said.get('format')}, and this version reads "
                f"format {FORMAT}: put it back with the version that made it, {said.get('version')}"
            )
        try:
            facts = Facts(**{**said, "missing": tuple(said.get("missing", ()))})
        except TypeError:
            raise self._damaged() from None
        if sha256(self.database) != facts.database_sha256:
            raise BackupError(
                f"{self.database} is not what the backup was made with: it was damaged, or used as "
                "a data directory. Take another backup"
            )
        return facts

    def _damaged(self) -> BackupError:
        return BackupError(
            f"{self.root / _WHOLE} is not what a backup says of itself: take another one"
        )

    def _why_not_whole(self) -> str:
        if (self.root / _UNFINISHED).exists():
            return (
                f"{self.root} is a backup that was not finished: `nightshift backup --to "
                f"{self.root}` goes on with it"
            )
        return f"{self.root} is no backup: name a directory that `nightshift backup --to` made"


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file in hex.

    Raises:
        BackupError: there is no such file.
    """
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except FileNotFoundError:
        raise BackupError(f"{file} is gone: the backup is damaged; take another one") from None


def sync_tree(folder: Path) -> None:
    """Have every directory of a tree on disk; its files are."""
    for below, _, _ in os.walk(folder):
        fsync.sync(Path(below))
