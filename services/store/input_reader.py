"""Reads batch inputs: files as ordered part blobs, and their line indexes."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from services.kit.clock import Clock
from services.store.blobs.base import BlobDamagedError, BlobMissingError, Blobs
from services.store.domain.line_index import IndexFormatError, LineIndex

Parts = Sequence[tuple[str, int]]
"""(blob name, bytes) of each part of a file, in order."""

_CACHED_BYTES = 32 * 1024 * 1024
_INDEX_READ_BYTES = 64 * 1024 * 1024
_LOST_SECONDS: Final = 4.0
"""An index that cannot be had is not asked for again before; less than the shortest wait for it."""
_MOST_LOST: Final = 1_000


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
        # Its index says that there is more.
        raise BlobDamagedError(parts[-1][0] if parts else "")
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


MakeAgain = Callable[[str], Awaitable[LineIndex]]
"""Returns the index of a name whose blob is lost. Raises BlobMissingError."""


class InputReader:
    """Line indexes, the last used ones kept in memory."""

    def __init__(self, blobs: Blobs, make_again: MakeAgain, clock: Clock) -> None:
        """Read from `blobs`; what is lost or damaged there is made again."""
        self._blobs = blobs
        self._make_again = make_again
        self._clock = clock
        # Of those that cannot be made again: until when that is not tried, and why.
        self._lost: dict[str, tuple[float, BlobMissingError]] = {}
        self._cache: OrderedDict[str, tuple[LineIndex, int]] = OrderedDict()
        self._cached_bytes = 0
        self._loading: dict[str, asyncio.Lock] = {}

    async def index(self, name: str) -> LineIndex:
        """Return the line index stored as blob `name`.

        Raises:
            BlobMissingError: it is lost, and the input that it would be made of again.
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
        until, why = self._lost.get(name, (0.0, None))
        if why is not None and self._clock.monotonic() < until:
            raise BlobMissingError(why.name)
        try:
            data = await read_whole(self._blobs, name)
            index, size = LineIndex.from_bytes(data), len(data)
        except (BlobMissingError, IndexFormatError):
            index = await self._again(name)
            size = sum(len(piece) for piece in index.pieces())
        self._cache[name] = (index, size)
        self._cached_bytes += size
        while self._cached_bytes > _CACHED_BYTES and len(self._cache) > 1:
            _, (_, size) = self._cache.popitem(last=False)
            self._cached_bytes -= size

    async def _again(self, name: str) -> LineIndex:
        try:
            index = await self._make_again(name)
        except BlobMissingError as error:
            if len(self._lost) >= _MOST_LOST:
                self._lost.clear()
            self._lost[name] = (self._clock.monotonic() + _LOST_SECONDS, error)
            raise
        self._lost.pop(name, None)
        return index
