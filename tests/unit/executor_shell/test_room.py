"""How much work an executor wants in hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.presence.room import (
    CHUNK_LINES,
    MAX_INPUT_BYTES,
    MAX_LINES,
    Room,
    Speed,
    expected_chunk_lines,
    room_of,
)

pytestmark = pytest.mark.unit


@settings(deadline=None)
@given(
    seats=st.integers(1, 4_096),
    rate=st.floats(0, 1e7),
    mean=st.floats(0, 64 * 1024 * 1024),
)
def test_the_marks_are_apart_and_within_their_caps(seats: int, rate: float, mean: float) -> None:
    room = room_of(seats=seats, lines_per_second=rate, mean_line_bytes=mean)
    assert 1 <= room.low < room.high <= MAX_LINES
    if mean:
        assert room.high <= max(2, MAX_INPUT_BYTES / mean)


def test_the_marks_follow_the_rule_while_below_the_caps() -> None:
    # Rate unknown: a chunk is a quarter of the seats.
    assert room_of(seats=64, lines_per_second=0, mean_line_bytes=0) == Room(low=72, high=88)
    # 10 a second: a chunk is 150 lines, more than a second of them.
    assert room_of(seats=64, lines_per_second=10, mean_line_bytes=0) == Room(low=139, high=289)
    # 1,000 a second: a second of lines is more than a chunk.
    assert room_of(seats=64, lines_per_second=1000, mean_line_bytes=0) == Room(low=1064, high=2064)


def test_an_engine_that_answers_at_once_has_at_least_eight_chunks_in_flight() -> None:
    room = room_of(seats=64, lines_per_second=50_000, mean_line_bytes=1_024)
    assert room.high == MAX_LINES
    assert room.low >= 8 * CHUNK_LINES
    # It asks for chunks, not for crumbs.
    assert room.high - room.low >= CHUNK_LINES


@pytest.mark.parametrize(
    ("seats", "rate", "lines"),
    [(64, 0, 16), (1, 0, 1), (64, 0.01, 1), (64, 10, 150), (64, 1e6, 512)],
)
def test_chunks_are_expected_as_a_scheduler_cuts_them(seats: int, rate: float, lines: int) -> None:
    assert expected_chunk_lines(seats, rate) == lines


def test_chunks_are_wanted_up_to_the_high_mark() -> None:
    room = Room(low=100, high=200)
    assert room.chunks_wanted(200, 10, 8) == 0
    assert room.chunks_wanted(500, 10, 8) == 0
    assert room.chunks_wanted(199, 10, 8) == 1
    assert room.chunks_wanted(170, 10, 8) == 3
    assert room.chunks_wanted(0, 10, 8) == 8


def test_speed_is_known_after_the_first_lines_and_idle_time_does_not_count() -> None:
    speed = Speed(seats=64)
    assert speed.lines_per_second() == 0
    speed.note(0.001, 16)
    assert speed.lines_per_second() == pytest.approx(16_000)
    # Nothing was noted while it waited for work.
    speed.note(0.001, 16)
    assert speed.lines_per_second() == pytest.approx(16_000)


def test_speed_forgets_a_fast_past_after_four_seatfuls() -> None:
    speed = Speed(seats=64)
    for _ in range(1_000):
        speed.note(0.001, 50)
    assert speed.lines_per_second() == pytest.approx(50_000, rel=0.01)
    for _ in range(5):
        speed.note(1.0, 64)
    assert speed.lines_per_second() == pytest.approx(64, rel=0.01)


def test_seats_that_finish_together_are_no_burst() -> None:
    speed = Speed(seats=64)
    for _ in range(6):
        for _ in range(20):
            speed.note(1.0, 0)
        speed.note(0.001, 64)
    assert speed.lines_per_second() == pytest.approx(64 / 20, rel=0.05)


def test_speed_sinks_while_nothing_finishes() -> None:
    speed = Speed(seats=4)
    speed.note(0.1, 100)
    before = speed.lines_per_second()
    for _ in range(100):
        speed.note(0.1, 0)
    assert speed.lines_per_second() < before / 50


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1_000)), max_size=200))
def test_speed_is_never_negative_and_holds_little(notes: list[tuple[float, int]]) -> None:
    speed = Speed(seats=8)
    for seconds, lines in notes:
        speed.note(seconds, lines)
    assert speed.lines_per_second() >= 0
    assert len(speed._buckets) <= len(notes)
