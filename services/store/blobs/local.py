"""Blobs in a directory, synced before they are named. Several stores may share it."""

import asyncio
import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, ParamSpec

from services.kit import fsync
from services.kit.process.log import get_logger
from services.kit.wire.errors import UnavailableError
from services.kit.wire.ids import uuid7_hex
from services.store.blobs.base import BlobMissingError, Blobs, BlobUnreadableError, Content

_log = get_logger(__name__)

P = ParamSpec("P")

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_OF_FILE: Final = frozenset({errno.EIO, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP})
"""What a disk says of one file; others may be read all the same."""
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
        writing = _Unfinished(self._tmp)
        try:
            if isinstance(content, bytes):
                with _told(name):
                    await writing.run(self._put_whole, writing, name, content)
                return len(content)
            size = 0
            with _told(name):
                await writing.run(writing.begin)
            async for data in content:
                with _told(name):
                    await writing.run(writing.write, data)
                size += len(data)
            with _told(name):
                await writing.run(self._settle, writing, name)
            return size
        except BaseException:
            writing.leave()
            raise

    def _put_whole(self, writing: "_Unfinished", name: str, content: bytes) -> None:
        writing.begin()
        writing.write(content)
        self._settle(writing, name)

    def _settle(self, writing: "_Unfinished", name: str) -> None:
        if self._durable:
            writing.sync()
        place = self._root / name
        if place.parent not in self._synced:
            # Also where it exists: who made it may have died, or failed, before it was synced.
            place.parent.mkdir(parents=True, exist_ok=True)
            for above in (place.parent.parent, self._root, self._root.parent):
                self._sync_directory(above)
            self._synced.add(place.parent)
        writing.rename(place)
        self._sync_directory(place.parent)

    def _sync_directory(self, directory: Path) -> None:
        if self._durable:
            fsync.sync(directory)

    async def read(self, name: str, offset: int, length: int) -> bytes:
        """See `Blobs.read`."""
        return await asyncio.to_thread(self._read, name, offset, length)

    def _read(self, name: str, offset: int, length: int) -> bytes:
        with _told(name):
            try:
                return read_file(self._root, name, offset, length)
            except BlobUnreadableError as error:
                _log.error("blob_unreadable", blob=name, error=error.why)
                raise
            except BlobMissingError:
                # Without this folder all of it is away, such as a disk that is not mounted: a
                # fault that ends, while a blob that is missing never comes back by itself.
                self._tmp.stat()
                raise

    async def look(self) -> None:
        """See `Blobs.look`."""
        await asyncio.to_thread(self._look)

    def _look(self) -> None:
        try:
            self._tmp.stat()
            why = "" if os.access(self._tmp, os.W_OK) else "cannot be written"
        except OSError as error:
            why = f"cannot be used ({error.strerror})"
        if why:
            raise UnavailableError(
                f"the directory of blobs {why}: see whether its disk is mounted, and may be "
                "written by the store",
                retry_after_seconds=_FAULT_RETRY_SECONDS,
            )

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


class _Unfinished:
    """A file on its way, worked on by one thread after the other.

    Who waits for them may be cancelled at any moment, and then the thread goes on alone. It must
    not give the file its name later, when nobody would look for it there, and nobody but it may
    close what it is about to write to: the descriptor's number might be another file's by then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._busy = False
        self._left = False

    async def run(self, step: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Take a step in a thread."""
        self._busy = True
        await asyncio.to_thread(self._run, lambda: step(*args, **kwargs))

    def _run(self, step: Callable[[], None]) -> None:
        try:
            step()
        finally:
            self._busy = False
            if self._left:
                self._drop()

    def leave(self) -> None:
        """Leave nothing of it; not awaited, since the caller may be cancelled."""
        self._left = True
        if self._busy:
            # Gone before the thread can give it its name, or else it has that name already.
            self._unlink()
        else:
            self._drop()

    def begin(self) -> None:
        """Open a new file and lock it for as long as it is open."""
        while True:
            path = self._folder / uuid7_hex()
            file = path.open("xb", buffering=0)
            self._path, self._file = path, file
            fcntl.flock(file, fcntl.LOCK_EX)
            # A store that begins at this moment may have taken it for a leftover.
            if path.exists() or self._left:
                return
            file.close()

    def write(self, data: bytes | memoryview) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def sync(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())

    def rename(self, place: Path) -> None:
        assert self._path is not None
        assert self._file is not None
        if self._left:
            raise FileNotFoundError
        self._path.rename(place)
        # Not before: while it is open, another store sees that its writer lives.
        self._file.close()

    def _drop(self) -> None:
        self._unlink()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _unlink(self) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


def _remove_if_left(unfinished: Path) -> None:
    """Remove a half-written file, unless another store on the same directory writes it."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), unfinished.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unfinished.unlink()


def read_file(folder: Path, name: str, offset: int, length: int) -> bytes:
    """Return up to `length` bytes of a blob in a folder, from `offset`.

    Raises:
        BlobMissingError: there is no such blob.
        BlobUnreadableError: the disk does not give it.
        OSError: the disk gives nothing.
    """
    try:
        return _read_all(folder / name, offset, length)
    except (FileNotFoundError, NotADirectoryError):
        raise BlobMissingError(name) from None
    except OSError as error:
        if error.errno in _OF_FILE:
            raise BlobUnreadableError(name, os.strerror(error.errno)) from error
        raise


def _read_all(path: Path, offset: int, length: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        pieces = []
        while length > 0 and (piece := os.pread(descriptor, length, offset)):
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    finally:
        os.close(descriptor)
