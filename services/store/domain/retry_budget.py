"""How long work that keeps ending its process is left alone, so that other work gets done."""

from typing import Final

SUSPECT_TRIES: Final = 2
"""Begun so often without an end, it runs with nothing else beside it."""
MOST_VALIDATIONS: Final = 6
"""After so many, an input counts as one that cannot be checked."""
_LONGEST_MS: Final = 600_000
_FAULT_MS: Final = 5_000
_LONGEST_FAULT_MS: Final = 300_000


def wait_ms(tries: int) -> int:
    """Return the pause before the next try, in milliseconds.

    Args:
        tries: how often it was begun. One that did not end is no reason to wait: whatever died
            then most often did not die of it.
    """
    if tries < SUSPECT_TRIES:
        return 0
    return int(min(1_000 * 4 ** min(tries - SUSPECT_TRIES, 8), _LONGEST_MS))


def fault_wait_ms(failures: int) -> int:
    """Return the pause after a failure that ended nothing, in milliseconds: 5 s to 5 minutes.

    Args:
        failures: how many there were in a row, this one included.
    """
    return int(min(_FAULT_MS * 2 ** min(failures - 1, 10), _LONGEST_FAULT_MS))
