"""What a batch waits for, in words for people."""

from dataclasses import dataclass, replace
from typing import Final

from services.store.domain.retry_budget import SUSPECT_TRIES
from services.store.domain.state import TERMINAL, BatchStatus

MOST_AHEAD: Final = 1_000
"""Batches ahead are counted up to this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What is known of a pool's executors. None: not heard of lately."""

    id: str
    alive: int | None
    ready: int | None
    engine_revision: str | None
    trouble: str | None = None
    """Why an engine of it does not start, in the engine's own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engine configurations of one pool that ran lines of a batch, first ones first."""

    pool: str
    revisions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """See `BatchExplanation`; None where there is nothing to say."""

    pool: str | None = None
    queue_position: int | None = None
    executors: int | None = None
    reason: str | None = None
    engine_revision: str | None = None
    engines: tuple[Engines, ...] = ()


NOTHING: Final = Explanation()
_WORK: Final = {
    BatchStatus.VALIDATING: "checking its input",
    BatchStatus.FINALIZING: "writing its end files",
    BatchStatus.CANCELLING: "writing its end files",
}


def explain(
    status: BatchStatus,
    pool: Pool | None,
    ahead: int,
    *,
    fault: str | None = None,
    tries: int = 0,
    for_operator: bool = False,
) -> Explanation:
    """Say what a batch waits for.

    Args:
        status: its status.
        pool: the pool of its lines; None until validated.
        ahead: batches of the pool before it that have lines to hand out, at most `MOST_AHEAD`.
        fault: why its input could not be read, or its end files not be written, when that was last
            tried; None otherwise.
        tries: how often its validating or finalizing was begun, the one that runs included.
        for_operator: whether an engine's own words may be shown, which name paths and hosts.
    """
    if status in TERMINAL:
        fault = None
    elif fault is None and tries >= SUSPECT_TRIES and status in _WORK:
        # It may end each store that tries it, which then says nothing.
        fault = (
            f"{_WORK[status]} was begun {tries} times and has not ended; it is tried again, less "
            "and less often, and the operator's log of the store says what ended it"
        )
    if pool is None:
        return replace(NOTHING, reason=fault)
    runs = status == BatchStatus.IN_PROGRESS
    return Explanation(
        pool=pool.id,
        queue_position=ahead if runs else None,
        executors=pool.ready if runs else None,
        reason=fault or (_reason(pool, ahead, for_operator=for_operator) if runs else None),
        engine_revision=pool.engine_revision,
    )


def _reason(pool: Pool, ahead: int, *, for_operator: bool) -> str | None:
    if pool.alive == 0:
        return f"no executor of pool {pool.id} is alive"
    if pool.ready == 0:
        idle = f"no engine of pool {pool.id} is ready"
        if not pool.trouble:
            return idle
        if for_operator:
            return f"{idle}: {pool.trouble}"
        return f"{idle}: it does not start or died; the operator's log of the executor says why"
    if not ahead:
        return None
    if ahead >= MOST_AHEAD:
        return f"{MOST_AHEAD} or more batches ahead"
    return f"{ahead} {'batch' if ahead == 1 else 'batches'} ahead"
