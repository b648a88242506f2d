"""Reads batch inputs: files as ordered part blobs, and their line indexes."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from services.kit.process.clock import Clock
from services.kit.wire.errors import UnavailableError
from services.store.blobs.base import (
    BlobDamagedError,
    BlobMissingError,
    Blobs,
    BlobTrouble,
    BlobUnreadableError,
)
from services.store.domain.index.line_index import IndexFormatError, LineIndex

Parts = Sequence[tuple[str, int]]
"""(blob name, bytes) of each part of a file, in order."""

_CACHED_BYTES = 32 * 1024 * 1024
_INDEX_READ_BYTES = 64 * 1024 * 1024
_LOST_SECONDS: Final = 4.0
"""An index that cannot be had is not asked for again before; less than the shortest wait for it."""
_MOST_LOST: Final = 1_000
_PENDING_SECONDS: Final = 0.5


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


class IndexPendingError(UnavailableError):
    """The index is being made again, which may take as long as an upload."""


class InputReader:
    """Line indexes, the last used ones kept in memory."""

    def __init__(self, blobs: Blobs, make_again: MakeAgain, clock: Clock) -> None:
        """Read from `blobs`; what is lost or damaged there is made again."""
        self._blobs = blobs
        self._make_again = make_again
        self._clock = clock
        # Goes on when those who asked for it have gone: it may take longer than any of their calls.
        self._making: dict[str, asyncio.Task[LineIndex]] = {}
        # Of those that cannot be made again: until when that is not tried, and why.
        self._lost: dict[str, tuple[float, BlobTrouble]] = {}
        self._cache: OrderedDict[str, tuple[LineIndex, int]] = OrderedDict()
        self._cached_bytes = 0
        self._loading: dict[str, asyncio.Lock] = {}

    async def index(self, name: str, *, patient: bool = True) -> LineIndex:
        """Return the line index stored as blob `name`.

        Args:
            name: of the blob.
            patient: whether to wait until one that is lost has been made again.

        Raises:
            BlobMissingError: it is lost, and the input that it would be made of again.
            BlobUnreadableError: the input that it would be made of again is not given.
            IndexPendingError: it is being made again, and the caller is not patient.
        """
        if name in self._cache:
            self._cache.move_to_end(name)
            return self._cache[name][0]
        patience = 0.0 if name in self._making else _PENDING_SECONDS
        lock = self._loading.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                if name not in self._cache and name not in self._making:
                    await self._load(name)
        finally:
            self._loading.pop(name, None)
        making = self._making.get(name)
        if making is None:
            return self._cache[name][0]
        if not patient:
            done, _ = await asyncio.wait({making}, timeout=patience)
            if not done:
                raise IndexPendingError("The line index of this input is being made again.")
        return await asyncio.shield(making)

    async def _load(self, name: str) -> None:
        """Read an index, or begin to make it again."""
        until, why = self._lost.get(name, (0.0, None))
        if why is not None and self._clock.monotonic() < until:
            raise _again(why)
        try:
            data = await read_whole(self._blobs, name)
            index = LineIndex.from_bytes(data)
        except (BlobMissingError, BlobUnreadableError, IndexFormatError):
            # All in it can be had of the input; a disk need not give it back.
            making = asyncio.create_task(self._make(name))
            self._making[name] = making
            making.add_done_callback(lambda done: self._made(name, done))
        else:
            self._keep(name, index, len(data))

    def _keep(self, name: str, index: LineIndex, size: int) -> None:
        # It may stand there: where a read failed, two who waited for it read at once.
        _, before = self._cache.pop(name, (None, 0))
        self._cache[name] = (index, size)
        self._cached_bytes += size - before
        while self._cached_bytes > _CACHED_BYTES and len(self._cache) > 1:
            _, (_, size) = self._cache.popitem(last=False)
            self._cached_bytes -= size

    async def _make(self, name: str) -> LineIndex:
        try:
            index = await self._make_again(name)
        except (BlobMissingError, BlobUnreadableError) as error:
            if len(self._lost) >= _MOST_LOST:
                self._lost.clear()
            self._lost[name] = (self._clock.monotonic() + _LOST_SECONDS, error)
            raise
        self._lost.pop(name, None)
        self._keep(name, index, sum(len(piece) for piece in index.pieces()))
        return index

    def _made(self, name: str, making: "asyncio.Task[LineIndex]") -> None:
        del self._making[name]
        # Nobody may be left who asked for it.
        if not making.cancelled():
            making.exception()


def _again(why: BlobTrouble) -> BlobTrouble:
    """Return what was raised before, to be raised anew: each has a traceback of its own."""
    if isinstance(why, BlobUnreadableError):
        return BlobUnreadableError(why.name, why.why)
    return type(why)(why.name)
