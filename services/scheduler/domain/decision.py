"""One decision of the dispatch: which chunks to cut now."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from services.kit.wire.ids import PoolId
from services.scheduler.domain.capacity import Capacity
from services.scheduler.domain.chunker import Cut, never_short, next_chunk
from services.scheduler.domain.policies.base import Policy
from services.scheduler.domain.window import Window

MOST_CUTS: Final = 64
"""Cuts of one call to the store."""


@dataclass(frozen=True, slots=True)
class State:
    """All that a decision rests on.

    Attributes:
        capacities: of the pools that can be published to; others wait.
    """

    window: Window
    capacities: Mapping[PoolId, Capacity]
    policy: Policy


def decide(state: State, now_ms: int) -> list[Cut]:
    """Return the chunks to cut now, at most `MOST_CUTS`; none when there is nothing to do.

    Cuts of one pool are in the policy's order. Pools take turns, so that none waits for another.
    What a pool gets is below its room plus one chunk.

    Args:
        state: what is known.
        now_ms: the store's clock, in milliseconds since the epoch.
    """
    turns = deque(
        _cuts_of_pool(state, pool_id, now_ms)
        for pool_id, capacity in sorted(state.capacities.items())
        if capacity.room
    )
    cuts: list[Cut] = []
    while turns and len(cuts) < MOST_CUTS:
        turn = turns.popleft()
        cut = next(turn, None)
        if cut is not None:
            cuts.append(cut)
            turns.append(turn)
    return cuts


def _cuts_of_pool(state: State, pool_id: PoolId, now_ms: int) -> Iterator[Cut]:
    capacity = state.capacities[pool_id]
    room = capacity.room
    for batch in state.policy.order(state.window.open_batches(pool_id, now_ms), now_ms):
        rest = batch
        while rest.lines_left:
            if room <= 0:
                return
            cut = next_chunk(rest, capacity)
            yield cut
            room -= cut.max_lines
            rest = rest.after(cut.max_lines)
        # A cut may come out shorter than planned, by its bytes or its model. Then lines of this
        # batch are left, and they go first: what follows waits for the store's answer.
        if not never_short(batch):
            return
