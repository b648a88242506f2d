"""Blobs in a directory, synced before they are named."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from services.kit import failpoints
from services.kit.ids import uuid7_hex
from services.store.blobs.base import BlobMissingError


class LocalBlobs:
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
        self._tmp.mkdir(parents=True, exist_ok=True)
        for leftover in self._tmp.iterdir():
            _remove_if_left(leftover)

    async def put(
        self, step: str, name: str, content: bytes | AsyncIterator[bytes | memoryview]
    ) -> int:
        """See `Blobs.put`."""
        failpoints.before(step)
        size = await self._put(name, content)
        failpoints.after(step)
        return size

    async def _put(self, name: str, content: bytes | AsyncIterator[bytes | memoryview]) -> int:
        if isinstance(content, bytes):
            return await asyncio.to_thread(self._put_whole, name, content)
        file, unfinished = await asyncio.to_thread(self._begin)
        size = 0
        try:
            async for data in content:
                await asyncio.to_thread(_write_all, file, data)
                size += len(data)
            await asyncio.to_thread(self._settle, file, unfinished, name)
        except BaseException:
            # Not awaited: the caller may be cancelled, and nothing may be left all the same.
            file.close()
            unfinished.unlink(missing_ok=True)
            raise
        return size

    def _put_whole(self, name: str, content: bytes) -> int:
        file, unfinished = self._begin()
        try:
            _write_all(file, content)
            self._settle(file, unfinished, name)
        except BaseException:
            file.close()
            unfinished.unlink(missing_ok=True)
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
        if not place.parent.is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            for made in (place.parent.parent, self._root):
                self._sync_directory(made)
        unfinished.rename(place)
        # Not before: while it is open, another store sees that its writer lives.
        file.close()
        self._sync_directory(place.parent)

    def _sync_directory(self, directory: Path) -> None:
        if not self._durable:
            return
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    async def read(self, name: str, offset: int, length: int) -> bytes:
        """See `Blobs.read`."""
        return await asyncio.to_thread(self.read_now, name, offset, length)

    def read_now(self, name: str, offset: int, length: int) -> bytes:
        """Read in the calling thread; as `read` otherwise."""
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

    async def delete(self, step: str, name: str) -> None:
        """See `Blobs.delete`."""
        failpoints.before(step)
        await asyncio.to_thread((self._root / name).unlink, missing_ok=True)
        failpoints.after(step)


def _remove_if_left(unfinished: Path) -> None:
    """Remove a half-written file, unless another store on the same directory writes it."""
    try:
        with unfinished.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unfinished.unlink()
    except (FileNotFoundError, BlockingIOError):
        return


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
