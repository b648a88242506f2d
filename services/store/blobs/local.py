"""Blobs in a directory, synced before they are named. Several stores may share it."""

import asyncio
import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from services.kit.errors import UnavailableError
from services.kit.ids import uuid7_hex
from services.kit.log import get_logger
from services.store import folders
from services.store.blobs.base import BlobMissingError, Blobs, Content

_log = get_logger(__name__)

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_RETRY_SECONDS: Final = 30
"""Room comes from people or the sweeper; the official clients wait as long as this, not minutes."""
_FAULT_RETRY_SECONDS: Final = 5


class LocalBlobs(Blobs):
    """A directory tree `project/kind/hex`; half-written ones lie in `tmp` until they are whole."""

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        """Use `root`, which is made; what a process that is gone left half-written is removed.

        Args:
            root: the directory.
            durable: whether `put` waits for the disk.
        """
        self._root = root
        self._tmp = root / "tmp"
        self._durable = durable
        # Folders whose own entries are on disk, as far as this process knows.
        self._synced: set[Path] = set()
        self._tmp.mkdir(parents=True, exist_ok=True)
        for leftover in self._tmp.iterdir():
            _remove_if_left(leftover)

    async def _put(self, step: str, name: str, content: Content) -> int:
        if isinstance(content, bytes):
            return await asyncio.to_thread(self._put_whole, name, content)
        with _told(name):
            file, unfinished = await asyncio.to_thread(self._begin)
        size = 0
        try:
            async for data in content:
                with _told(name):
                    await asyncio.to_thread(_write_all, file, data)
                size += len(data)
            with _told(name):
                await asyncio.to_thread(self._settle, file, unfinished, name)
        except BaseException:
            # Not awaited: the caller may be cancelled, and nothing may be left all the same.
            _drop(file, unfinished)
            raise
        return size

    def _put_whole(self, name: str, content: bytes) -> int:
        with _told(name):
            file, unfinished = self._begin()
            try:
                _write_all(file, content)
                self._settle(file, unfinished, name)
            except BaseException:
                _drop(file, unfinished)
                raise
        return len(content)

    def _begin(self) -> tuple[BinaryIO, Path]:
        """Open a new file and lock it for as long as it is open."""
        while True:
            unfinished = self._tmp / uuid7_hex()
            file = unfinished.open("xb", buffering=0)
            fcntl.flock(file, fcntl.LOCK_EX)
            # A store that begins at this moment may have taken it for a leftover.
            if unfinished.exists():
                return file, unfinished
            file.close()

    def _settle(self, file: BinaryIO, unfinished: Path, name: str) -> None:
        if self._durable:
            os.fsync(file.fileno())
        place = self._root / name
        if place.parent not in self._synced:
            # Also where it exists: who made it may have died, or failed, before it was synced.
            place.parent.mkdir(parents=True, exist_ok=True)
            for above in (place.parent.parent, self._root, self._root.parent):
                self._sync_directory(above)
            self._synced.add(place.parent)
        unfinished.rename(place)
        # Not before: while it is open, another store sees that its writer lives.
        file.close()
        self._sync_directory(place.parent)

    def _sync_directory(self, directory: Path) -> None:
        if self._durable:
            folders.sync(directory)

    async def read(self, name: str, offset: int, length: int) -> bytes:
        """See `Blobs.read`."""
        return await asyncio.to_thread(self._read, name, offset, length)

    def _read(self, name: str, offset: int, length: int) -> bytes:
        with _told(name):
            try:
                descriptor = os.open(self._root / name, os.O_RDONLY)
            except FileNotFoundError:
                raise BlobMissingError(name) from None
            try:
                pieces = []
                while length > 0 and (piece := os.pread(descriptor, length, offset)):
                    pieces.append(piece)
                    offset += len(piece)
                    length -= len(piece)
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            finally:
                os.close(descriptor)

    async def _delete(self, names: tuple[str, ...]) -> None:
        await asyncio.to_thread(self._unlink, names)

    def _unlink(self, names: tuple[str, ...]) -> None:
        failed: UnavailableError | None = None
        for name in names:
            try:
                with _told(name):
                    (self._root / name).unlink(missing_ok=True)
            except UnavailableError as error:
                # One that cannot go must not keep the others.
                failed = error
        # Else they are there again after a power cut, when no row knows of them any more.
        for folder in {(self._root / name).parent for name in names}:
            with _told(folder.name), contextlib.suppress(FileNotFoundError):
                self._sync_directory(folder)
        if failed is not None:
            raise failed


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Turn a disk's refusal into what a caller is told."""
    try:
        yield
    except OSError as error:
        _log.error("blob_failed", blob=name, error=error.strerror, errno=error.errno)
        if error.errno in _FULL:
            raise UnavailableError(
                "The store's disk is full, so that nothing was stored. Try again once files were "
                "deleted or the disk was made larger.",
                retry_after_seconds=_FULL_RETRY_SECONDS,
            ) from error
        raise UnavailableError(
            "The store's disk does not work right now, so that nothing was stored or read; "
            "try again.",
            retry_after_seconds=_FAULT_RETRY_SECONDS,
        ) from error


def _remove_if_left(unfinished: Path) -> None:
    """Remove a half-written file, unless another store on the same directory writes it."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), unfinished.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unfinished.unlink()


def _drop(file: BinaryIO, unfinished: Path) -> None:
    with contextlib.suppress(OSError):
        file.close()
    with contextlib.suppress(OSError):
        unfinished.unlink(missing_ok=True)


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
