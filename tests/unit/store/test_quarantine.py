"""Halving suspects loses none of them and reaches one line in as few steps as there can be."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.domain.results import count_lines, intersect, normalise
from services.store.work.chunks_repo import pack_ranges, unpack_ranges
from services.store.work.quarantine import halves

pytestmark = pytest.mark.unit

ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=6).map(
    normalise
)


@given(ranges)
def test_halves_are_all_of_it_and_equally_large(lines: list[tuple[int, int]]) -> None:
    left, right = halves(lines)
    assert normalise([*left, *right]) == lines
    assert intersect(left, right) == []
    assert count_lines(left) - count_lines(right) in (0, 1)


@given(ranges, st.data())
def test_any_line_is_alone_after_ceil_log2_steps(
    lines: list[tuple[int, int]], data: st.DataObject
) -> None:
    steps = math.ceil(math.log2(count_lines(lines)))
    for _ in range(steps):
        left, right = halves(lines)
        lines = right if right and data.draw(st.booleans()) else left
    assert count_lines(lines) == 1


@given(ranges)
def test_packed_ranges_come_back(lines: list[tuple[int, int]]) -> None:
    assert unpack_ranges(pack_ranges(lines)) == lines
    assert unpack_ranges(b"") == []
