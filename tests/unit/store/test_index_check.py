"""A line index against its file: the right one passes, however awkward the file, others do not."""

import random

import pytest

from services.store.domain.checks.index_check import (
    NEIGHBOUR_BYTES,
    difference,
    limits_of,
    line_fault,
    samples,
    table_fault,
)
from services.store.domain.index.line_index import BOM, LineIndex, LineIndexer

pytestmark = pytest.mark.unit

PIECES = (
    b'{"custom_id":"a","method":"POST","url":"/v1/x","body":{"model":"m","messages":[]}}',
    b'{"custom_id":"b","method":"POST","url":"/v1/y","body":{"model":"n","input":"t"}}',
    b'{"custom_id":"a"}',
    b'{"a":1}',
    b"[1]",
    b"no json",
    b"\xff\xfe",
    b"   ",
    b"",
    b'{"pad":"' + b"x" * 120 + b'"}',
    b"\r",
    BOM + b'{"a":1}',
    BOM,
    b"\xc2\xa0",
    b'{"a":1}\r',
    b'\r{"a":1}',
)


def index_of(content: bytes, *, max_lines: int = 50, max_line_bytes: int = 100) -> LineIndex:
    indexer = LineIndexer(max_lines=max_lines, max_line_bytes=max_line_bytes, key=b"k")
    indexer.feed(content)
    return indexer.finish()


def faults(index: LineIndex, content: bytes) -> list[str]:
    found = [table_fault(index, len(content))]
    if found == [None]:
        for ordinal in samples(index):
            offset, length = index.span(ordinal)
            found.append(
                line_fault(
                    index,
                    ordinal,
                    before=content[max(0, offset - NEIGHBOUR_BYTES) : offset],
                    line=content[offset : offset + length],
                    after=content[offset + length : offset + length + NEIGHBOUR_BYTES],
                )
            )
    return [fault for fault in found if fault is not None]


@pytest.mark.parametrize("seed", range(200))
def test_the_index_of_any_file_passes(seed: int) -> None:
    chance = random.Random(seed)
    lines = chance.choices(PIECES, k=chance.randint(0, 40))
    content = chance.choice([b"", BOM]) + chance.choice([b"\n", b"\r\n"]).join(lines)
    content += chance.choice([b"", b"\n"])
    max_lines, max_line_bytes = chance.choice([1, 5, 60]), chance.choice([10, 100, 200])
    index = index_of(content, max_lines=max_lines, max_line_bytes=max_line_bytes)
    assert faults(index, content) == []

    # The present setting may be another than the one of then.
    again, most = limits_of(index, chance.choice([max_line_bytes, 1 << 24]))
    fresh = LineIndexer(max_lines=again, max_line_bytes=most, key=b"another")
    fresh.feed(content)
    assert difference(index, fresh.finish()) is None


def test_the_index_of_another_file_does_not() -> None:
    content = b"\n".join(PIECES[:4])
    for other in (b"\n".join(PIECES[3::-1]), content[10:], b"\n" + content, content + b"\n[1]"):
        assert faults(index_of(other), content) or difference(index_of(content), index_of(other))
    shorter = content.replace(b'"url":"/v1/x"', b'"url":"/v1/z"')
    assert faults(index_of(content), shorter) == ["line 0 has another url than it says"]
    unlike = content.replace(b'"custom_id":"b"', b'"custom_id":"a"')
    assert difference(index_of(content), index_of(unlike)) == "has a wrong custom_id for line 1"
    assert "puts line 0" in faults(index_of(content), b"{}")[0]
