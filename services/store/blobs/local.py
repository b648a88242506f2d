"""Blobs in a directory, synced before they are named."""

import asyncio
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
        """Use `root`, which is made; what an earlier process left half-written is removed.

        Args:
            root: the directory.
            durable: whether `put` waits for the disk.
        """
        self._root = root
        self._tmp = root / "tmp"
        self._durable = durable
        self._tmp.mkdir(parents=True, exist_ok=True)
        for leftover in self._tmp.iterdir():
            leftover.unlink()

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
        unfinished = self._tmp / uuid7_hex()
        file = await asyncio.to_thread(unfinished.open, "xb", buffering=0)
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
        unfinished = self._tmp / uuid7_hex()
        file = unfinished.open("xb", buffering=0)
        try:
            _write_all(file, content)
            self._settle(file, unfinished, name)
        except BaseException:
            file.close()
            unfinished.unlink(missing_ok=True)
            raise
        return len(content)

    def _settle(self, file: BinaryIO, unfinished: Path, name: str) -> None:
        if self._durable:
            os.fsync(file.fileno())
        file.close()
        place = self._root / name
        if not place.parent.is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            for made in (place.parent.parent, self._root):
                self._sync_directory(made)
        unfinished.rename(place)
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


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
