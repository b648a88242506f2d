"""What is said of a pool to people, and when it is news."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from services.kit.wire.ids import PoolId
from services.scheduler.domain.capacity import ExecutorWord

_NOTABLE: Final = 0.1
"""A speed that changes by less than this share is no news."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """A pool's executors taken together.

    Attributes:
        alive: how many beat.
        ready: whose engine takes work.
        seats: of the ready ones together.
        lines_per_second: of the ready ones together; 0 while unknown.
        trouble: why an engine of it is not ready, in its own words; empty where none says so.
    """

    pool_id: PoolId
    alive: int
    ready: int
    seats: int
    lines_per_second: float
    trouble: str = ""


def report_of(pool_id: PoolId, words: Iterable[ExecutorWord]) -> PoolReport:
    """Return what is to be said of a pool, from the last words of its live executors."""
    heard = list(words)
    ready = [word for word in heard if word.ready]
    # One of them speaks for all, and always the same one.
    troubled = sorted((word.executor_id, word.trouble) for word in heard if word.trouble)
    return PoolReport(
        pool_id=pool_id,
        alive=len(heard),
        ready=len(ready),
        seats=sum(word.seats for word in ready),
        lines_per_second=sum(word.lines_per_second for word in ready),
        trouble=troubled[0][1] if troubled else "",
    )


def differs(before: Mapping[PoolId, PoolReport], now: Mapping[PoolId, PoolReport]) -> bool:
    """Tell whether something is to be said that was not said before."""
    return before.keys() != now.keys() or any(
        _is_news(before[pool_id], report) for pool_id, report in now.items()
    )


def _is_news(before: PoolReport, now: PoolReport) -> bool:
    if (before.alive, before.ready, before.seats, before.trouble) != (
        now.alive,
        now.ready,
        now.seats,
        now.trouble,
    ):
        return True
    slower, faster = sorted((before.lines_per_second, now.lines_per_second))
    return faster - slower > _NOTABLE * faster
