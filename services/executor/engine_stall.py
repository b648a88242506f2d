"""Tells an engine that hangs from one that is slow, by its longest step so far. Pure."""

from typing import Final

LONGEST_STEPS: Final = 3
"""An engine may take so many times its longest step so far before it counts as dead."""


class Stall:
    """What was seen of an engine's steps; it stays when the engine is started anew."""

    def __init__(self) -> None:
        """Begin without a step seen."""
        self._stalled_before = 0.0
        self._longest_step_seconds = 0.0

    def judge(self, stalled_seconds: float, *, at_least_seconds: float) -> str:
        """Return why the engine counts as dead; empty while it does not.

        Args:
            stalled_seconds: since its last step with work waiting, asked every now and then.
            at_least_seconds: it may always take so long.
        """
        if stalled_seconds < self._stalled_before:
            # It made a step, which had taken at least so long.
            self._longest_step_seconds = max(self._longest_step_seconds, self._stalled_before)
        self._stalled_before = stalled_seconds
        limit = max(at_least_seconds, LONGEST_STEPS * self._longest_step_seconds)
        if stalled_seconds < limit:
            return ""
        self._stalled_before = 0.0
        return (
            f"the engine made no step for {stalled_seconds:.0f} s with work waiting; where it is "
            f"only slow, set NIGHTSHIFT_EXECUTOR_STALL_SECONDS above {limit:.0f}"
        )
