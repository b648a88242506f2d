"""Parts indexed apart and joined in any order have the index of their concatenation."""

import dataclasses
import itertools
import json
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.store.domain.index import line_index, names
from services.store.domain.index.body_shape import Shape
from services.store.domain.index.line_index import IndexFormatError, LineIndex, LineIndexer
from services.store.domain.index.part_index import PartIndex, PartIndexer, PartJoiner
from tests.kit.jsonl_files import MAX_LINE, files

pytestmark = pytest.mark.unit

KEY = b"the key of one upload"
MAX_LINES = 12
BOM = b"\xef\xbb\xbf"


def line(custom_id: str = "a", **changes: object) -> bytes:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/x", "body": {"model": "m"}}
    return json.dumps(request | changes).encode()


def indexer_of(kind: type[LineIndexer], max_lines: int, max_line_bytes: int) -> LineIndexer:
    return kind(max_lines=max_lines, max_line_bytes=max_line_bytes, key=KEY)


def whole(data: bytes, max_lines: int = MAX_LINES, max_line_bytes: int = MAX_LINE) -> LineIndex:
    indexer = indexer_of(LineIndexer, max_lines, max_line_bytes)
    indexer.feed(data)
    return indexer.finish()


def part_of(
    data: bytes,
    max_lines: int = MAX_LINES,
    max_line_bytes: int = MAX_LINE,
    *,
    feed_bytes: int = 1 << 30,
) -> PartIndex:
    indexer = indexer_of(PartIndexer, max_lines, max_line_bytes)
    assert isinstance(indexer, PartIndexer)
    for start in range(0, len(data), feed_bytes):
        indexer.feed(data[start : start + feed_bytes])
    return indexer.finish_part()


def joined(
    indexes: list[PartIndex],
    data: bytes,
    max_lines: int = MAX_LINES,
    max_line_bytes: int = MAX_LINE,
) -> LineIndex:
    """Join; `data` is their concatenation, of which only what is wanted is shown."""
    joiner = indexer_of(PartJoiner, max_lines, max_line_bytes)
    assert isinstance(joiner, PartJoiner)

    def shown(offset: int, length: int) -> bytes:
        assert length <= max_line_bytes + 4
        assert offset + length <= len(data)
        return data[offset : offset + length]

    for index in indexes:
        joiner.add(index, shown(*joiner.wanted(index)))
    return joiner.finish_file(shown(*joiner.wanted_at_end()))


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(at % (len(data) + 1) for at in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(
    files | st.binary(max_size=60),
    st.lists(st.integers(0, 2000), max_size=8),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
@example(BOM + line() + b"\r\n" + line("b"), [1, 2, len(line()) + 3], 7, random.Random(0))
@example(b"\n" * 30 + b"{}", [3, 30], 1, random.Random(0))
@example(b"x" * (MAX_LINE + 9) + b"\r\n{}", [MAX_LINE, MAX_LINE + 5], 50, random.Random(0))
@example(b"1\n" + BOM + b"{}\n2", [], 9, random.Random(0))
@example(b"a\nb\rc\nd", [], 9, random.Random(0))
@example(b"", [], 1, random.Random(0))
def test_any_bytes_cut_anywhere_and_in_any_order(
    data: bytes, cuts: list[int], feed_bytes: int, chance: random.Random
) -> None:
    parts = cut(data, cuts)
    indexes = [part_of(part, feed_bytes=feed_bytes) for part in parts]
    assert joined(indexes, data).to_bytes() == whole(data).to_bytes()

    order = list(range(len(parts)))
    chance.shuffle(order)
    shuffled = b"".join(parts[number] for number in order)
    again = joined([indexes[number] for number in order], shuffled)
    assert again.to_bytes() == whole(shuffled).to_bytes()


@given(files, st.lists(st.integers(0, 2000), max_size=30), st.integers(1, 4))
def test_a_limit_of_few_lines_leaves_the_same_ones(
    data: bytes, cuts: list[int], max_lines: int
) -> None:
    parts = cut(data, cuts)
    indexes = [part_of(part, max_lines) for part in parts]
    assert joined(indexes, data, max_lines).to_bytes() == whole(data, max_lines).to_bytes()


@given(files, st.integers(1, 40))
def test_bytes_and_back(data: bytes, feed_bytes: int) -> None:
    index = part_of(data, feed_bytes=feed_bytes)
    stored = index.to_bytes()
    again = PartIndex.from_bytes(stored)
    assert again.to_bytes() == stored
    scalars = [field.name for field in dataclasses.fields(PartIndex) if field.name != "between"]
    assert [getattr(again, name) for name in scalars] == [getattr(index, name) for name in scalars]


def test_each_byte_a_part() -> None:
    data = BOM + b"\r\n".join([line("a"), b"", line("b", url="/v1/y"), b" \t", line("a")])
    indexes = [part_of(data[at : at + 1]) for at in range(len(data))]
    index = joined(indexes, data)
    assert index.to_bytes() == whole(data).to_bytes()
    assert [index.physical_line(ordinal) for ordinal in range(3)] == [1, 3, 5]
    assert index.records["hash"][0] == index.records["hash"][2] != index.records["hash"][1]
    assert index.span(0) == (len(BOM), len(line("a")))


def test_empty_parts_change_nothing() -> None:
    data = line("a") + b"\n" + line("b")
    indexes = [part_of(piece) for piece in (b"", data[:20], b"", data[20:], b"")]
    assert joined(indexes, data).to_bytes() == whole(data).to_bytes()
    assert joined([], b"").shape == joined([part_of(b"")], b"").shape == Shape.EMPTY


def test_a_mark_counts_only_at_the_files_start() -> None:
    marked, plain = BOM + line("a") + b"\n", line("b") + b"\n"
    first = joined([part_of(marked), part_of(plain)], marked + plain)
    assert first.records["flags"][0] & line_index.OBJECT
    second = joined([part_of(plain), part_of(marked)], plain + marked)
    assert second.records["flags"].tolist()[1] == line_index.NOT_JSON


def test_ids_of_names_become_those_of_the_file() -> None:
    one = b"".join(line(str(i), url=f"/v1/{i}") + b"\n" for i in range(4))
    two = b"".join(line(str(i), url=f"/v1/{i}") + b"\n" for i in (6, 3, 5, 1))
    index = joined([part_of(one), part_of(two)], one + two)
    assert index.urls == ("/v1/0", "/v1/1", "/v1/2", "/v1/3", "/v1/6", "/v1/5")
    assert index.records["url"].tolist() == [0, 1, 2, 3, 4, 3, 5, 1]


def test_a_part_that_lost_names_is_not_joined() -> None:
    data = b"".join(line(str(i), url=f"{i:0500}") + b"\n" for i in range(2200))
    assert len(data) > names.MAX_NAMES_BYTES
    index = part_of(data, 5000, 1000)
    assert not index.complete
    assert not PartIndex.from_bytes(index.to_bytes()).complete
    with pytest.raises(ValueError, match="more names"):
        joined([index], data, 5000, 1000)


def test_names_that_only_all_parts_together_exceed() -> None:
    data = b"".join(line(str(i), url=f"{i:0500}") + b"\n" for i in range(2200))
    parts = cut(data, [400_001, 800_002])
    indexes = [part_of(part, 5000, 1000) for part in parts]
    assert all(index.complete for index in indexes)
    assert joined(indexes, data, 5000, 1000).to_bytes() == whole(data, 5000, 1000).to_bytes()


def test_offsets_beyond_four_gigabytes() -> None:
    """One index, told as if a part of 5 GB without an end of line lay before it."""
    far = dataclasses.replace(part_of(b"x"), size=5 * 10**9, first=5 * 10**9)
    near = part_of(b"\n" + line("a") + b"\n")
    joiner = indexer_of(PartJoiner, MAX_LINES, MAX_LINE)
    assert isinstance(joiner, PartJoiner)
    joiner.add(far, b"")
    assert joiner.wanted(near) == (0, MAX_LINE + 4)
    joiner.add(near, b"x" * (MAX_LINE + 4))
    index = joiner.finish_file(b"")
    assert index.span(1) == (5 * 10**9 + 1, len(line("a")))
    assert index.records["flags"][0] == line_index.TOO_LONG


def test_an_endless_first_piece_takes_no_memory() -> None:
    indexer = PartIndexer(max_lines=5, max_line_bytes=1000, key=KEY)
    for _ in range(2000):
        indexer.feed(b"x" * 1000)
    assert len(indexer._open) == 0
    index = indexer.finish_part()
    assert (index.size, index.first, index.last, index.ends_line) == (
        2_000_000,
        2_000_000,
        0,
        False,
    )
    with pytest.raises(ValueError, match="finished"):
        indexer.feed(b"x")


@pytest.mark.parametrize(
    "damage", [b"", b"NSPART\x02\x00" + bytes(8), b"NSPART\x01\x00" + bytes(8)]
)
def test_foreign_bytes_are_refused(damage: bytes) -> None:
    with pytest.raises(IndexFormatError):
        PartIndex.from_bytes(damage)
    stored = part_of(b"\n" + line() + b"\n").to_bytes()
    for end in (len(stored) - 1, 40, 12):
        with pytest.raises(IndexFormatError):
            PartIndex.from_bytes(stored[:end])
