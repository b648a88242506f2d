"""Which answers of an engine end a line, and how long the others wait (design rule 8). Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.executor.engines.base import EngineResponse

COUNTED_RETRIES: Final = 3
"""How often an answer that may be a passing fault is asked for again."""
BASE_SECONDS: Final = 0.5
LONGEST_SECONDS: Final = 30.0

_PASSING_4XX: Final = frozenset({408, 409, 425, 429})
# The engine asks for time: it refused no line, so nothing is counted against one.
_BUSY: Final = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Settled:
    """The answer is the line's result."""


@dataclass(frozen=True, slots=True)
class Again:
    """The line runs again after `seconds`; `counted` tells whether it uses up one of its tries."""

    seconds: float
    counted: bool


SETTLED: Final = Settled()


def judge(
    response: EngineResponse, *, counted: int, retries: int, chance: float
) -> Settled | Again:
    """Decide what follows from an answer.

    Args:
        response: the answer.
        counted: retries of the line that counted so far.
        retries: all its retries so far, which the wait grows with.
        chance: a random number in [0, 1), for full jitter.
    """
    status = response.status
    if status < 500 and status not in _PASSING_4XX:
        return SETTLED
    if status not in _BUSY and counted >= COUNTED_RETRIES:
        return SETTLED
    longest = min(LONGEST_SECONDS, BASE_SECONDS * 2.0 ** min(retries, 16))
    wait = chance * longest
    if response.retry_after_seconds is not None:
        # At least as long as asked for, and not all at the same moment.
        wait += max(0.0, response.retry_after_seconds)
    return Again(seconds=wait, counted=status not in _BUSY)


class Backoff:
    """Growing waits between tries of one thing, with full jitter above half of each."""

    def __init__(self, shortest: float, longest: float, chance: Callable[[], float]) -> None:
        """Wait between `shortest` and `longest` seconds; `chance` gives numbers in [0, 1)."""
        self._shortest = shortest
        self._longest = longest
        self._chance = chance
        self._next = shortest

    def reset(self) -> None:
        """Begin with the shortest wait again: it worked."""
        self._next = self._shortest

    def next_seconds(self) -> float:
        """Return how long to wait now; the following wait is up to twice as long."""
        wait = self._next
        self._next = min(self._longest, 2 * wait)
        return wait * (0.5 + 0.5 * self._chance())
