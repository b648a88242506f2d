"""Blobs looked at and never changed: what a check and a backup read, beside a store that works."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

from services.store.blobs.local import read_file
from services.store.blobs.where_kept import bucket_of, folder_of
from services.store.settings import StoreSettings

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}/[a-z]{1,32}/[0-9a-f]{32}")
UNFINISHED: Final = "tmp"
"""Where half-written blobs lie in a directory; a store makes it, so that it is always there."""


def is_name(name: Any) -> bool:
    """Tell whether a blob can have this name; a damaged row may hold anything."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


class BlobReader(Protocol):
    """A place of blobs, read in the calling thread; may be used by several at once."""

    def size(self, name: str) -> int | None:
        """Return a blob's size in bytes; None where there is none of that name."""
        ...

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes of a blob from `offset`.

        Raises:
            BlobMissingError: there is none of that name.
            BlobUnreadableError: it is there and is not given.
        """
        ...

    def names(self) -> Iterator[tuple[str, int]]:
        """Yield name and size in bytes of every blob that was written whole, in no order."""
        ...

    def unfinished(self) -> int:
        """Return how many blobs are being written, or were when a store was killed."""
        ...


class FolderReader:
    """Blobs in a directory. `LocalBlobs` would remove what a running store has half-written."""

    def __init__(self, folder: Path) -> None:
        """Look at `folder`, which may be missing."""
        self._folder = folder

    def size(self, name: str) -> int | None:
        """See `BlobReader.size`."""
        try:
            return (self._folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, name: str, offset: int, length: int) -> bytes:
        """See `BlobReader.read`."""
        return read_file(self._folder, name, offset, length)

    def names(self) -> Iterator[tuple[str, int]]:
        """See `BlobReader.names`."""
        yield from self._below(self._folder, "")

    def _below(self, folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                name = f"{prefix}{entry.name}"
                if name == UNFINISHED:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from self._below(folder / entry.name, f"{name}/")
                    continue
                # It may go while we look: then it is none of those that are there.
                with contextlib.suppress(FileNotFoundError):
                    yield name, entry.stat(follow_symlinks=False).st_size

    def unfinished(self) -> int:
        """See `BlobReader.unfinished`."""
        with contextlib.suppress(FileNotFoundError):
            return sum(1 for _ in (self._folder / UNFINISHED).iterdir())
        return 0


def blob_reader(settings: StoreSettings) -> BlobReader:
    """Return what reads the blobs of a store with these settings.

    Raises:
        SettingsError: they name no place for blobs.
    """
    folder = folder_of(settings)
    if folder is not None:
        return FolderReader(folder)
    # Imported where it is used: a check of a directory needs none of it.
    from services.store.blobs.s3.reader import S3Reader

    return S3Reader(*bucket_of(settings))
