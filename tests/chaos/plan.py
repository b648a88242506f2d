"""Which faults a round makes, and when: drawn from a seed, so that it can be repeated. Pure.

A plan is a deck of all that can happen to a system, shuffled and dealt again and again: every kind
of fault on every kind of process comes before any comes twice. What the processes are doing at
that moment is not repeated with it; the same seed finds the same fault again more often than not.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["kill", "freeze", "restart", "part", "wipe"]

OVERLAP: Final = 0.3
"""How often the next fault comes while one still lasts."""
WAITS: Final = (0.5, 3.0)
"""Seconds from one fault to the next, or from its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Something that can happen to a system.

    Attributes:
        kind: `kill` and start again after a while, `freeze` and let go on, `restart` in order,
            `part` from others and join again, `wipe` what it keeps while it is killed.
        choices: whom it can happen to. Each is the names of those that it happens to at once; for
            `part`, who is parted, then the kinds of those whom it cannot reach.
        shortest: seconds that it lasts at least.
        longest: seconds that it lasts at most.
    """

    kind: Kind
    choices: tuple[tuple[str, ...], ...]
    shortest: float = 0.0
    longest: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One step of a plan.

    Attributes:
        number: its place, from 1.
        wait_seconds: from the fault before (or its end, unless that one overlaps).
        kind: see `Card`.
        targets: see `Card`.
        seconds: how long it lasts.
        overlaps: whether the next one's wait begins with this one and not with its end.
    """

    number: int
    wait_seconds: float
    kind: Kind
    targets: tuple[str, ...]
    seconds: float
    overlaps: bool

    def __str__(self) -> str:
        """Return it on one line."""
        whom = ", ".join(self.targets)
        if self.kind == "part":
            whom = f"{self.targets[0]} from {', '.join(self.targets[1:])}"
        then = ", meanwhile" if self.overlaps else ""
        return (
            f"{self.number:3}. after {self.wait_seconds:.2f} s {self.kind} {whom} "
            f"for {self.seconds:.2f} s{then}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All faults of a round, in order."""

    seed: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        """Return the whole plan, a line for each fault."""
        return "\n".join([f"seed {self.seed}:", *(str(fault) for fault in self.faults)])


def draw(seed: int, deck: Sequence[Card], seconds: float) -> Plan:
    """Draw the plan of a round that makes faults for about `seconds`."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    hand: list[Card] = []
    passed = 0.0
    while True:
        if not hand:
            hand = list(deck)
            rng.shuffle(hand)
        card = hand.pop()
        fault = Fault(
            number=len(faults) + 1,
            wait_seconds=round(rng.uniform(*WAITS), 2),
            kind=card.kind,
            targets=rng.choice(card.choices),
            seconds=round(rng.uniform(card.shortest, card.longest), 2),
            overlaps=rng.random() < OVERLAP,
        )
        passed += fault.wait_seconds + (0 if fault.overlaps else fault.seconds)
        if passed > seconds and faults:
            return Plan(seed=seed, faults=tuple(faults))
        faults.append(fault)
