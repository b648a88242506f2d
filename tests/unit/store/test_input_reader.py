"""Line indexes that are lost: who waits for a new one, and who does not."""

import asyncio
from pathlib import Path

import pytest

from services.kit.process.clock import ManualClock
from services.kit.wire.errors import UnavailableError
from services.store.blobs.base import BlobMissingError
from services.store.blobs.local import LocalBlobs
from services.store.domain.index.line_index import LineIndex, LineIndexer
from services.store.inputs.input_reader import IndexPendingError, InputReader

pytestmark = pytest.mark.unit


class Faulty(LocalBlobs):
    """Blobs of which the first read fails; the next two end when both have begun."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads = 0
        self.both = asyncio.Event()

    async def read(self, name: str, offset: int, length: int) -> bytes:
        self.reads += 1
        if self.reads == 1:
            # Let others come who want the same.
            await asyncio.sleep(0)
            raise UnavailableError("away")
        if self.reads == 3:
            self.both.set()
        await self.both.wait()
        return await super().read(name, offset, length)


class Maker:
    """Makes an index once it is let to; fails while there is no input."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.made = 0
        self.input_is_there = True

    async def make_again(self, name: str) -> LineIndex:
        self.made += 1
        await self.go.wait()
        if not self.input_is_there:
            raise BlobMissingError(f"input of {name}")
        return LineIndexer(max_lines=10, max_line_bytes=100, key=b"").finish()


async def test_it_is_made_once_for_all_and_outlives_who_asked(tmp_path: Path) -> None:
    maker = Maker()
    reader = InputReader(LocalBlobs(tmp_path), maker.make_again, ManualClock())
    with pytest.raises(IndexPendingError):
        await reader.index("p/index/1", patient=False)
    first = asyncio.create_task(reader.index("p/index/1"))
    second = asyncio.create_task(reader.index("p/index/1"))
    with pytest.raises(IndexPendingError):
        await reader.index("p/index/1", patient=False)
    first.cancel()
    await asyncio.wait({first})
    maker.go.set()
    index = await second
    assert await reader.index("p/index/1", patient=False) is index
    assert maker.made == 1


async def test_what_cannot_be_made_again_is_not_tried_by_everybody(tmp_path: Path) -> None:
    maker, clock = Maker(), ManualClock()
    maker.go.set()
    maker.input_is_there = False
    reader = InputReader(LocalBlobs(tmp_path), maker.make_again, clock)
    for _ in range(3):
        with pytest.raises(BlobMissingError, match="input of p/index/1"):
            await reader.index("p/index/1", patient=False)
    assert maker.made == 1
    maker.input_is_there = True
    clock.advance(5)
    await reader.index("p/index/1")
    assert maker.made == 2


async def test_what_is_read_twice_takes_its_room_once(tmp_path: Path) -> None:
    """Two may read an index at once where one before them could not."""
    blobs = Faulty(tmp_path)
    index = LineIndexer(max_lines=10, max_line_bytes=100, key=b"").finish()
    await blobs.put("test.step", "p/index/0", index.to_bytes())
    reader = InputReader(blobs, Maker().make_again, ManualClock())
    first, second = [asyncio.create_task(reader.index("p/index/0")) for _ in range(2)]
    with pytest.raises(UnavailableError):
        await first
    await asyncio.gather(second, reader.index("p/index/0"))
    assert blobs.reads == 3
    assert reader._cached_bytes == sum(size for _, size in reader._cache.values())
