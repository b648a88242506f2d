"""What engine deaths a project may cost a pool: a few at once, then a share of the pool's time.

A bucket for each project and pool: each death that lines of the project are to blame for adds one,
and the pool's time takes them off again, `SHARE` of it. Above `FREE_DEATHS` the batch is held until
the bucket is down to them again.
"""

from dataclasses import dataclass
from typing import Final

FREE_DEATHS: Final = 10.0
"""Deaths that hold nothing up: about what finding one poison line takes."""
SHARE: Final = 0.1
"""Of a pool's time, what deaths beyond those may take."""
MOST_DEATHS: Final = 40
"""Deaths of one batch; after them its suspects are given up together, without being searched."""
_LEAST_COST_MS: Final = 1_000
_LONGEST_HOLD: Final = 0.25
"""Of the time that is left until a batch expires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one death takes.

    Attributes:
        taken_ms: an executor's time, until its engine is ready again.
        executors: of the pool.
    """

    taken_ms: int
    executors: int

    @property
    def spread_ms(self) -> float:
        """The time in which the pool can spare that much of its own."""
        return max(self.taken_ms, _LEAST_COST_MS) / (SHARE * max(1, self.executors))


def charged(deaths: float, elapsed_ms: int, cost: Cost) -> float:
    """Return a bucket's deaths with one more, so long after it was last written."""
    return max(0.0, deaths - max(0, elapsed_ms) / cost.spread_ms) + 1.0


def hold_ms(deaths: float, cost: Cost, left_ms: int) -> int:
    """Return for how long the batch of the latest death is held, in milliseconds.

    Args:
        deaths: in the bucket.
        cost: of one of them.
        left_ms: until the batch expires.
    """
    wanted = max(0.0, deaths - FREE_DEATHS) * cost.spread_ms
    return int(min(wanted, max(0, left_ms) * _LONGEST_HOLD))


def is_spent(batch_deaths: int, deaths: float, cost: Cost, left_ms: int) -> bool:
    """Tell whether a batch's suspects are searched no more.

    That is after too many deaths, or where the batch would expire before it may go on.
    """
    wanted = max(0.0, deaths - FREE_DEATHS) * cost.spread_ms
    return batch_deaths >= MOST_DEATHS or wanted > max(0, left_ms)
