"""The size of chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.wire.ids import BatchId, PoolId
from services.scheduler.domain.capacity import Capacity
from services.scheduler.domain.chunker import (
    MAX_CHUNK_BYTES,
    MAX_CHUNK_LINES,
    full_chunk_lines,
    next_chunk,
)
from services.scheduler.domain.window import WindowBatch

pytestmark = pytest.mark.unit


def capacity(*, executors: int = 1, seats: int = 64, rate: float = 0.0) -> Capacity:
    return Capacity(
        executors=executors,
        seats=seats,
        lines_per_second=rate,
        asked_lines=8_192,
        unopened_lines=0,
    )


def batch(total: int, cut: int = 0, line_bytes: int = 1_000) -> WindowBatch:
    return WindowBatch(
        batch_id=BatchId("batch_1"),
        seq=1,
        pool_id=PoolId("a-1"),
        lines_total=total,
        lines_cut=cut,
        expires_at_ms=1,
        line_bytes_mean=line_bytes,
    )


capacities = st.builds(
    capacity,
    executors=st.integers(0, 100),
    seats=st.integers(0, 2_048),
    rate=st.floats(0, allow_infinity=True, allow_nan=False),
)


@given(capacities, st.integers(1, 50_000), st.integers(0, 50_000), st.integers(0, 16 * 1024**2))
def test_a_chunk_is_within_its_bounds(pool: Capacity, left: int, cut: int, line_bytes: int) -> None:
    chunk = next_chunk(batch(left + cut, cut, line_bytes), pool)
    assert 1 <= chunk.max_lines <= min(MAX_CHUNK_LINES, left)
    assert chunk.max_lines == 1 or chunk.max_lines * line_bytes <= MAX_CHUNK_BYTES
    assert chunk.max_bytes == MAX_CHUNK_BYTES
    assert chunk.max_lines <= full_chunk_lines(pool)


@pytest.mark.parametrize(
    ("rate", "lines"), [(0.0, 16), (0.01, 1), (2.0, 30), (34.2, 512), (20_000.0, 512)]
)
def test_a_chunk_from_the_middle_takes_the_slowest_fifteen_seconds(rate: float, lines: int) -> None:
    assert next_chunk(batch(50_000, 25_000), capacity(rate=rate)).max_lines == lines


def test_the_head_is_small_where_chunks_take_long() -> None:
    slow = capacity(rate=8.0)
    assert next_chunk(batch(50_000), slow).max_lines == 30
    assert next_chunk(batch(50_000, 1_000), slow).max_lines == 120


def test_the_tail_is_spread_where_chunks_take_long() -> None:
    slow = capacity(rate=8.0, executors=4)
    assert next_chunk(batch(50_000, 49_840), slow).max_lines == 20
    assert next_chunk(batch(50_000, 49_840), capacity(rate=8.0)).max_lines == 120


def test_an_engine_that_answers_at_once_gets_full_chunks_all_along() -> None:
    fast = capacity(rate=20_000.0, executors=2)
    for cut in (0, 25_000, 50_000 - 512):
        assert next_chunk(batch(50_000, cut), fast).max_lines == 512


def test_no_whole_batch_goes_to_one_executor_of_several() -> None:
    assert next_chunk(batch(400), capacity(rate=20_000.0, executors=4)).max_lines == 100
    # But for one that a quarter of the seats takes.
    assert next_chunk(batch(10), capacity(rate=20_000.0, executors=4)).max_lines == 10
