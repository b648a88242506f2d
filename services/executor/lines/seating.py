"""Who has seats in the engine: a line takes as many as it has sequences, at most all."""

import math
from collections import deque
from typing import Final

from services.executor.attempts import Running
from services.executor.input_lines import Line

SLICE_LINES: Final = 64
"""Lines given to an engine before others may use the loop."""
SLICE_BYTES: Final = 256 * 1024
"""And their bytes, the last line's apart: an engine may read all of them before others do."""


class Seating:
    """The lines in one engine, from its start to its end."""

    def __init__(self, seats: int, ahead: int) -> None:
        """Begin with none.

        Args:
            seats: of the engine.
            ahead: seats' worth of lines that may wait inside of it.
        """
        self._seats = seats
        self._ahead = ahead
        self._taken = 0
        self._seated = 0
        # Those that wait for seats inside the engine, in order; their time has not begun.
        self._unseated: deque[Running] = deque()

    @property
    def free(self) -> int:
        """Seats' worth of lines that may still go in."""
        return self._seats + self._ahead - self._taken

    def slice_of(self, ready: deque[Line]) -> list[Line]:
        """Take the first lines that may go in now; nothing overtakes the first."""
        lines: list[Line] = []
        free = self.free
        size = 0
        while ready and len(lines) < SLICE_LINES and size < SLICE_BYTES:
            free -= self._seats_of(ready[0])
            if free < 0:
                break
            size += len(ready[0].body)
            lines.append(ready.popleft())
        return lines

    def enter(self, running: Running) -> None:
        """Note that a line went in; its time begins unless it waits for seats inside."""
        seats = self._seats_of(running.line)
        self._taken += seats
        if self._unseated or self._seated + seats > self._seats:
            running.started_at = math.inf
            self._unseated.append(running)
        else:
            self._seated += seats

    def leave(self, running: Running, now: float) -> None:
        """Note that a line is out: the time of the first that wait for its seats begins."""
        seats = self._seats_of(running.line)
        self._taken -= seats
        if running.started_at == math.inf:
            self._unseated.remove(running)
        else:
            self._seated -= seats
        while self._unseated:
            seats = self._seats_of(self._unseated[0].line)
            if self._seated + seats > self._seats:
                return
            self._seated += seats
            self._unseated.popleft().started_at = now

    def _seats_of(self, line: Line) -> int:
        return min(line.seats, self._seats)
