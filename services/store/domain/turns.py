"""Turns that are given at a bounded rate: to projects in turn, within a project in order."""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Who waits for a turn. The more wait, the longer each does; a project waits for its own."""

    def __init__(self, *, per_second: float, burst: int) -> None:
        """Give `per_second` turns, and after a quiet time `burst` at once."""
        self._per_second = per_second
        self._burst = burst
        self._saved = float(burst)
        self._counted_at = 0.0
        # By project, that whose turn is next first.
        self._waiting: dict[str, dict[T, None]] = {}

    def ask(self, project_id: str, one: T) -> None:
        """Wait at the end of the project's line."""
        self._waiting.setdefault(project_id, {})[one] = None

    def leave(self, project_id: str, one: T) -> None:
        """Wait no longer; nothing where it does not."""
        line = self._waiting.get(project_id, {})
        line.pop(one, None)
        if not line:
            self._waiting.pop(project_id, None)

    def given(self, now: float) -> Iterator[T]:
        """Yield whose turn it is by `now`, in seconds of a clock that never jumps."""
        passed = max(0.0, now - self._counted_at)
        self._saved = min(self._burst, self._saved + passed * self._per_second)
        self._counted_at = now
        while self._waiting and self._saved >= 1:
            self._saved -= 1
            project_id, line = next(iter(self._waiting.items()))
            one = next(iter(line))
            del line[one], self._waiting[project_id]
            if line:
                self._waiting[project_id] = line
            yield one

    def next_in(self) -> float | None:
        """Return in how many seconds, seen from the last `given`, there is a turn for somebody."""
        return (1 - self._saved) / self._per_second if self._waiting else None

    def all(self) -> list[T]:
        """Return all that wait."""
        return [one for line in self._waiting.values() for one in line]
