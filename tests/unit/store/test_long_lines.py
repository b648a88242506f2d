"""What open lines take is bounded over all uploads, and no project takes it all."""

import asyncio

import pytest

from services.kit.wire.errors import UnavailableError
from services.kit.wire.ids import ProjectId
from services.store.domain.index.line_index import LineIndexer
from services.store.files import long_lines
from services.store.files.long_lines import LINES, LONG_BYTES, LongLine, LongLines

pytestmark = pytest.mark.unit


class Upload:
    """One that has sent the begin of a long line."""

    def __init__(self, line: LongLine) -> None:
        self.line = line
        self.indexer = LineIndexer(max_lines=5, max_line_bytes=3 * LONG_BYTES, key=b"k")

    async def feed(self, data: bytes = b"x") -> None:
        await self.line.feed(self.indexer, data)


async def test_long_lines_are_shared_by_projects(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LongLines()
    alices = [Upload(lines.of(ProjectId("alice"))) for _ in range(LINES)]
    for upload in alices:
        # Below the bound nobody waits.
        await upload.feed(b"x" * (LONG_BYTES + 1))
    feeds = [asyncio.ensure_future(upload.feed()) for upload in alices]
    half = LINES // 2
    await asyncio.wait_for(asyncio.gather(*feeds[:half]), 60)
    assert not any(feed.done() for feed in feeds[half:])

    bob = Upload(lines.of(ProjectId("bob")))
    await bob.feed(b"x" * (LONG_BYTES + 1))
    await asyncio.wait_for(bob.feed(), 60)

    # The end of a line, or of its upload, lets the next one go on.
    await bob.feed(b"\n")
    alices[0].line.end()
    await asyncio.wait_for(feeds[half], 60)
    monkeypatch.setattr(long_lines, "WAIT_SECONDS", 0.01)
    with pytest.raises(UnavailableError, match="try again"):
        await alices[0].feed()
    for feed in feeds:
        feed.cancel()
    await asyncio.wait(feeds)
    for upload in alices:
        upload.line.end()
    await asyncio.wait_for(alices[0].feed(b"\n"), 60)
