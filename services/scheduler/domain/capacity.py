"""What a pool can take now, from its executors' own words (design rule 7)."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.kit.wire.ids import PoolId


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorWord:
    """What an executor last said of itself, in lines.

    Attributes:
        at_ms: when, in milliseconds since the epoch by the executor's own clock.
        seats: requests that its engine runs at once.
        held_lines: lines in hand and not finished.
        low_water: asks for more below this.
        high_water: takes no more from this on.
        lines_per_second: its speed; 0 while unknown.
        ready: whether its engine takes work.
        trouble: why its engine died or did not start the last time; empty once it runs.
    """

    executor_id: str
    pool_id: PoolId
    at_ms: int
    seats: int
    held_lines: int
    low_water: int
    high_water: int
    lines_per_second: float
    ready: bool
    trouble: str = ""

    @property
    def asked_lines(self) -> int:
        """Lines that it asks for: up to high water once it is below low water, else none."""
        if not self.ready or self.held_lines >= self.low_water:
            return 0
        return max(0, self.high_water - self.held_lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A pool's live executors taken together.

    Attributes:
        executors: how many take work.
        seats: of the smallest of them.
        lines_per_second: of the slowest whose speed is known; 0 while none is.
        asked_lines: what they ask for together.
        unopened_lines: what is published and not yet opened by any of them.
    """

    executors: int
    seats: int
    lines_per_second: float
    asked_lines: int
    unopened_lines: int

    @property
    def room(self) -> int:
        """Lines that may be published now."""
        return max(0, self.asked_lines - self.unopened_lines)


def capacity_of(words: Iterable[ExecutorWord]) -> Capacity:
    """Return what one pool's executors can take while nothing is published to them.

    Args:
        words: of those that are alive.
    """
    ready = [word for word in words if word.ready]
    return Capacity(
        executors=len(ready),
        seats=min((word.seats for word in ready), default=0),
        lines_per_second=min(
            (word.lines_per_second for word in ready if word.lines_per_second > 0), default=0.0
        ),
        asked_lines=sum(word.asked_lines for word in ready),
        unopened_lines=0,
    )
