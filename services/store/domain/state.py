"""A batch's statuses and the only ways between them.

Drawn in docs/state_machine.md; a test compares the drawing with `TRANSITIONS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class BatchStatus(StrEnum):
    """The eight statuses of the public contract; the value is what clients read."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


INITIAL = BatchStatus.VALIDATING

#: From a status to those it may move to. A sealed batch may go straight to `expired`, or through
#: `finalizing` when its end files take long. Nothing leaves a terminal status.
TRANSITIONS: Mapping[BatchStatus, frozenset[BatchStatus]] = MappingProxyType(
    {
        BatchStatus.VALIDATING: frozenset(
            {
                BatchStatus.FAILED,
                BatchStatus.IN_PROGRESS,
                BatchStatus.CANCELLING,
                BatchStatus.EXPIRED,
            }
        ),
        BatchStatus.IN_PROGRESS: frozenset(
            {BatchStatus.FINALIZING, BatchStatus.CANCELLING, BatchStatus.EXPIRED}
        ),
        BatchStatus.FINALIZING: frozenset(
            {BatchStatus.COMPLETED, BatchStatus.CANCELLING, BatchStatus.EXPIRED}
        ),
        # Always to `cancelled`, also when the deadline passes meanwhile: the user spoke first.
        BatchStatus.CANCELLING: frozenset({BatchStatus.CANCELLED}),
        BatchStatus.FAILED: frozenset(),
        BatchStatus.COMPLETED: frozenset(),
        BatchStatus.EXPIRED: frozenset(),
        BatchStatus.CANCELLED: frozenset(),
    }
)

TERMINAL: frozenset[BatchStatus] = frozenset(
    status for status, targets in TRANSITIONS.items() if not targets
)

#: The column that entering a status sets, once and for good (Unix seconds). Creation sets
#: `created_at` and `expires_at` together.
TIMESTAMP_COLUMN: Mapping[BatchStatus, str] = MappingProxyType(
    {
        BatchStatus.VALIDATING: "created_at",
        BatchStatus.FAILED: "failed_at",
        BatchStatus.IN_PROGRESS: "in_progress_at",
        BatchStatus.FINALIZING: "finalizing_at",
        BatchStatus.COMPLETED: "completed_at",
        BatchStatus.EXPIRED: "expired_at",
        BatchStatus.CANCELLING: "cancelling_at",
        BatchStatus.CANCELLED: "cancelled_at",
    }
)


def can_move(source: BatchStatus, target: BatchStatus) -> bool:
    """Whether the drawing has an arrow from `source` to `target`."""
    return target in TRANSITIONS[source]


def sources(target: BatchStatus) -> frozenset[BatchStatus]:
    """The statuses from which `target` may be entered: the guard of the UPDATE that enters it.

    Empty for `validating`, which only creation enters.
    """
    return frozenset(source for source, targets in TRANSITIONS.items() if target in targets)


@dataclass(frozen=True, slots=True)
class Moved:
    """The call changes the status to `target` and sets its timestamp. Answered 200."""

    target: BatchStatus


@dataclass(frozen=True, slots=True)
class AlreadyThere:
    """The wish is granted already: 200 with the batch as it stands, nothing changed."""

    status: BatchStatus


@dataclass(frozen=True, slots=True)
class Conflict:
    """The batch has ended otherwise: 409, not to be retried. `message` is for the user."""

    status: BatchStatus
    message: str


CancelOutcome = Moved | AlreadyThere | Conflict


def cancel(status: BatchStatus) -> CancelOutcome:
    """What a cancel call does to a batch in `status`; never raises."""
    if can_move(status, BatchStatus.CANCELLING):
        return Moved(BatchStatus.CANCELLING)
    if status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
        return AlreadyThere(status)
    return Conflict(status, f"Cannot cancel a batch with status '{status.value}'.")
