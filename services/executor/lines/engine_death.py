"""What is known of an engine's death."""

from dataclasses import dataclass

from services.executor.attempts import Attempt

Casualties = dict[Attempt, list[int]]
"""The lines that were in the engine when it died, by attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """An engine's death.

    Attributes:
        reason: what is known of it, for people.
        casualties: the lines that were in it and had no answer.
        complete: whether nothing else was in it, such as lines that were being aborted.
    """

    reason: str
    casualties: Casualties
    complete: bool
