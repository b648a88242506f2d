"""How much work an executor wants in hand (design rule 7). Pure: numbers in, numbers out."""

from collections import deque
from dataclasses import dataclass
from typing import Final

MAX_LINES: Final = 8_192
"""No executor holds more lines than this, however fast it is."""
MAX_INPUT_BYTES: Final = 64 * 1024 * 1024
"""Nor more input than this, in bytes."""
CHUNK_LINES: Final = 512
"""The largest chunk that a scheduler cuts, in lines."""
CHUNK_SECONDS: Final = 15.0
"""The time that a chunk is to take on the slowest executor."""

# A burst of all seats is one sample: several of them make a rate.
_SEATFULS: Final = 4
_WINDOW_SECONDS: Final = 1.0
_BUCKET_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Room:
    """Marks of one moment, in lines: asks below `low`, takes no more at `high`.

    `low < high` always, so that an executor at rest neither asks nor refuses.
    """

    low: int
    high: int

    def chunks_wanted(self, held_lines: int, chunk_lines: int, most: int) -> int:
        """Return how many chunks of `chunk_lines` to pull, 0 to `most`, at `held_lines` in hand."""
        missing = self.high - held_lines
        if missing <= 0:
            return 0
        return max(1, min(most, missing // max(1, chunk_lines)))


def expected_chunk_lines(seats: int, lines_per_second: float) -> int:
    """Return the chunk size that a scheduler would choose for this executor alone."""
    if lines_per_second <= 0:
        return max(1, min(CHUNK_LINES, seats // 4))
    return max(1, min(CHUNK_LINES, int(lines_per_second * CHUNK_SECONDS)))


def room_of(*, seats: int, lines_per_second: float, mean_line_bytes: float) -> Room:
    """Return the marks.

    Args:
        seats: requests that the engine runs at once.
        lines_per_second: its speed; 0 while unknown.
        mean_line_bytes: mean input of the lines in hand; 0 while unknown.
    """
    chunk = expected_chunk_lines(seats, lines_per_second)
    low = seats + max(chunk / 2, lines_per_second)
    high = low + max(chunk, lines_per_second)
    most = MAX_LINES
    if mean_line_bytes > 0:
        # Compared before it is made an integer: the quotient may be infinite.
        most = int(min(most, max(2.0, MAX_INPUT_BYTES / mean_line_bytes)))
    if high > most:
        high = most
        # A quarter lies between the marks here, so that it asks for chunks and not for crumbs.
        low = min(low, 0.75 * high)
    return Room(low=int(low), high=int(high))


class Speed:
    """Lines finished per second of work: of the last second, and of four seatfuls of lines.

    Time in which nothing ran does not count, so that an engine that answers at once is known as
    fast after its first slice of lines, and one that waits for work is not taken for slow. A
    time-based window alone would see a burst from an engine that finishes all its seats together,
    a line-based one alone would remember a fast engine for ever.
    """

    def __init__(self, seats: int) -> None:
        """Start without an estimate."""
        self._least_lines = _SEATFULS * max(1, seats)
        self._work_seconds = 0.0
        # (work clock at the bucket's start, lines in it), oldest first.
        self._buckets: deque[tuple[float, int]] = deque()
        self._lines = 0
        self._bucket_from = 0.0
        self._bucket_lines = 0

    def note(self, work_seconds: float, lines: int) -> None:
        """Add `lines` finished within further `work_seconds` of work."""
        self._work_seconds += work_seconds
        self._bucket_lines += lines
        self._lines += lines
        if self._work_seconds - self._bucket_from >= _BUCKET_SECONDS and self._bucket_lines:
            self._buckets.append((self._bucket_from, self._bucket_lines))
            self._bucket_from = self._work_seconds
            self._bucket_lines = 0
            self._forget()

    def _forget(self) -> None:
        while len(self._buckets) > 1:
            lines = self._buckets[0][1]
            start = self._buckets[1][0]
            if self._work_seconds - start < _WINDOW_SECONDS:
                return
            if self._lines - lines < self._least_lines:
                return
            self._buckets.popleft()
            self._lines -= lines

    def lines_per_second(self) -> float:
        """Return the estimate; 0 until a line has finished."""
        start = self._buckets[0][0] if self._buckets else self._bucket_from
        seconds = self._work_seconds - start
        if not self._lines or seconds <= 0:
            return 0.0
        return self._lines / seconds
