"""Lines of an input, read in frames."""

from pathlib import Path

import numpy as np
import pytest

from services.kit.wire.frames import LINE_RECORD
from services.store.blobs.local import LocalBlobs
from services.store.domain.index.line_index import LineIndexer
from services.store.inputs import input_lines

pytestmark = pytest.mark.unit

NAME = "p/file/1"
MIB = 1024 * 1024


class Counted(LocalBlobs):
    """Blobs that note how much was read at once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[int] = []

    async def read(self, name: str, offset: int, length: int) -> bytes:
        self.reads.append(length)
        return await super().read(name, offset, length)


@pytest.mark.parametrize("between", [0, 500, 40_000, 100_000])
async def test_what_lies_between_lines_takes_little_room(tmp_path: Path, between: int) -> None:
    """As in a batch of several models, of which one has every second line."""
    lines = []
    for number in range(250):
        lines.append(b'{"custom_id":"mine-%d"}' % number)
        lines.append(b'{"custom_id":"other-%d","x":"%b"}' % (number, b"y" * between))
    content = b"\n".join(lines)
    blobs = Counted(tmp_path)
    await blobs.put("test.step", NAME, content)
    indexer = LineIndexer(max_lines=500, max_line_bytes=MIB, key=b"k")
    indexer.feed(content)
    mine = [(number, 1) for number in range(0, 500, 2)]
    found = {}
    async for records, payload in input_lines.frames(
        blobs, [(NAME, len(content))], indexer.finish(), mine
    ):
        at = 0
        for line, length in np.frombuffer(records, LINE_RECORD).tolist():
            found[line] = payload[at : at + length]
            at += length
    assert found == {number: lines[number] for number in range(0, 500, 2)}
    assert max(blobs.reads) <= 4 * MIB
    # Nor is each line read alone where they are near.
    assert len(blobs.reads) <= (250 if between > 65_536 else len(content) // MIB + 1)
