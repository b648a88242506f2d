"""What can happen to a system, as a deck: every kind of fault on every kind of process.

How long each lasts is chosen around the times that decide: leases of chunks (15 s) and of the
leader, `ack_wait` (10 s), a client's patience (10 s).
"""

import itertools
from collections.abc import Sequence
from typing import Final

from tests.chaos.plan import Card, Fault
from tests.kit.system import System

_AWAY: Final = (0.0, 4.0)
_SHORT: Final = (0.3, 3.0)
_LONG: Final = (10.5, 16.0)
"""Longer than `ack_wait_seconds`, and sometimes than a lease."""
_LONG_FOR: Final = frozenset({"executor", "scheduler"})
"""Whose place others take; the rest would only hold everything up."""


def deck_of(system: System) -> tuple[Card, ...]:
    """Return a deck for a system."""
    cards: list[Card] = []
    for kind, names in sorted(system.processes.items()):
        each = tuple((name,) for name in names)
        if kind in system.lasting:
            cards.append(_card("kill", each, _AWAY))
            if len(names) > 1:
                cards.append(_card("kill", (tuple(names),), _AWAY))
        cards.append(_card("freeze", each, _SHORT))
        if kind in _LONG_FOR:
            cards.append(_card("freeze", each, _LONG))
        if kind in system.lasting:
            cards.append(_card("restart", each, (0.0, 0.0)))
        others = tuple(system.reaches.get(kind, ()))
        if others:
            parts = [part for size in (1, 2) for part in itertools.combinations(others, size)]
            choices = tuple((name, *part) for name in names for part in parts)
            cards.append(_card("part", choices, _LONG if kind in _LONG_FOR else (1.0, 8.0)))
    if len(system.processes["nats"]) == 1:
        cards.append(_card("wipe", (("nats",),), _SHORT))
    # The most can go wrong where a result comes late, from one whose lines others have run.
    cards += [card for card in cards if card.shortest > 10 and "executor" in card.choices[0][0]]
    everything = [n for k, v in system.processes.items() if k in system.lasting - {"up"} for n in v]
    cards.append(_card("kill", (tuple(everything),), _AWAY))
    return tuple(cards)


def _card(kind: str, choices: tuple[tuple[str, ...], ...], bounds: tuple[float, float]) -> Card:
    return Card(kind=kind, choices=choices, shortest=bounds[0], longest=bounds[1])  # type: ignore[arg-type]


def executors_hit(fault: Fault, executors: Sequence[str]) -> list[str]:
    """Return which executors a fault may cost the lines that they have in hand."""
    if "up" in fault.targets and fault.kind in ("kill", "restart"):
        return list(executors)
    return [name for name in fault.targets if name in executors]
