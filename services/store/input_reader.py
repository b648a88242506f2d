"""Reads batch inputs: files as ordered part blobs, and their line indexes."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from services.store.blobs.base import BlobMissingError, Blobs
from services.store.domain.line_index import LineIndex

Parts = Sequence[tuple[str, int]]
"""(blob name, bytes) of each part of a file, in order."""

_CACHED_BYTES = 32 * 1024 * 1024
_INDEX_READ_BYTES = 64 * 1024 * 1024


async def read_span(blobs: Blobs, parts: Parts, offset: int, length: int) -> bytes:
    """Return `length` bytes of a file from `offset`, across its parts.

    Raises:
        BlobMissingError: a part is gone or shorter than its row says.
    """
    pieces = []
    start = 0
    for name, size in parts:
        if length <= 0:
            break
        if offset < start + size:
            wanted = min(length, start + size - offset)
            piece = await blobs.read(name, offset - start, wanted)
            if len(piece) != wanted:
                raise BlobMissingError(name)
            pieces.append(piece)
            offset += wanted
            length -= wanted
        start += size
    if length > 0:
        raise BlobMissingError("a span past the file's end")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def read_whole(blobs: Blobs, name: str) -> bytes:
    """Return all of a blob.

    Raises:
        BlobMissingError: there is none.
    """
    pieces = []
    offset = 0
    while piece := await blobs.read(name, offset, _INDEX_READ_BYTES):
        pieces.append(piece)
        offset += len(piece)
        if len(piece) < _INDEX_READ_BYTES:
            break
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class InputReader:
    """Line indexes, the last used ones kept in memory."""

    def __init__(self, blobs: Blobs) -> None:
        """Read from `blobs`."""
        self._blobs = blobs
        self._cache: OrderedDict[str, tuple[LineIndex, int]] = OrderedDict()
        self._cached_bytes = 0
        self._loading: dict[str, asyncio.Lock] = {}

    async def index(self, name: str) -> LineIndex:
        """Return the line index stored as blob `name`.

        Raises:
            BlobMissingError: there is none.
        """
        if name in self._cache:
            self._cache.move_to_end(name)
            return self._cache[name][0]
        lock = self._loading.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                if name not in self._cache:
                    await self._load(name)
                return self._cache[name][0]
        finally:
            self._loading.pop(name, None)

    async def _load(self, name: str) -> None:
        data = await read_whole(self._blobs, name)
        self._cache[name] = (LineIndex.from_bytes(data), len(data))
        self._cached_bytes += len(data)
        while self._cached_bytes > _CACHED_BYTES and len(self._cache) > 1:
            _, (_, size) = self._cache.popitem(last=False)
            self._cached_bytes -= size
