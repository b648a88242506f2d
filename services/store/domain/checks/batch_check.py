"""What must be true of a batch's row whatever runs, and how to mend what is not.

`result_check` and `chunk_check` go on with the rows that only an open batch has.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from services.store.domain.checks import statement
from services.store.domain.checks.fault import Fault
from services.store.domain.checks.statement import Sql
from services.store.domain.state import TERMINAL, TIMESTAMP_COLUMN, BatchStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """A batch's row, as far as it is checked; the names are those of the columns."""

    id: str
    seq: int
    version: int
    project_id: str
    pool_id: str | None
    status: str
    created_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    sealed_ms: int | None
    seal_outcome: str | None
    mixed: bool
    index_blob: str | None
    input_bytes: int
    lines_total: int
    lines_cut: int
    lines_done: int
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    output_file_id: str | None
    error_file_id: str | None

    @property
    def is_ended(self) -> bool:
        """Whether it has its end files, if any, and never changes again."""
        return self.status in TERMINAL

    def update(self, **values: object) -> str:
        """Return the statement that sets these columns."""
        return statement.update("batches", {"id": self.id}, **values)


_S: Final = BatchStatus
_ENDS: Final = tuple(TIMESTAMP_COLUMN[status] for status in sorted(TERMINAL))

#: Timestamps that a batch of each status has; all others but `created_at` may be there or not.
_REQUIRED: Final[Mapping[BatchStatus, tuple[str, ...]]] = MappingProxyType(
    {
        _S.VALIDATING: (),
        _S.FAILED: ("failed_at",),
        _S.IN_PROGRESS: ("in_progress_at",),
        _S.FINALIZING: ("in_progress_at", "finalizing_at"),
        _S.COMPLETED: ("in_progress_at", "finalizing_at", "completed_at"),
        _S.EXPIRED: ("expired_at",),
        _S.CANCELLING: ("cancelling_at",),
        _S.CANCELLED: ("cancelling_at", "cancelled_at"),
    }
)
#: Timestamps that it cannot have, besides those of ends that are not its own.
_FORBIDDEN: Final[Mapping[BatchStatus, tuple[str, ...]]] = MappingProxyType(
    {
        _S.VALIDATING: ("in_progress_at", "finalizing_at", "cancelling_at"),
        _S.FAILED: ("in_progress_at", "finalizing_at", "cancelling_at"),
        _S.IN_PROGRESS: ("finalizing_at", "cancelling_at"),
        _S.FINALIZING: ("cancelling_at",),
        _S.COMPLETED: ("cancelling_at",),
        _S.EXPIRED: ("cancelling_at",),
        _S.CANCELLING: (),
        _S.CANCELLED: (),
    }
)
_BY_HAND: Final = "Stop nightshift, run the statement, and check again."
_LATEST: Final = Sql("coalesce(finalizing_at, cancelling_at, in_progress_at, created_at)")


def row_faults(batch: BatchFacts) -> Iterator[Fault]:
    """Check status against timestamps and seal, and counts against each other."""
    if batch.status not in set(BatchStatus):
        yield _fault(batch, f"has the status {batch.status!r}, which there is not", "")
        return
    status = BatchStatus(batch.status)
    yield from _time_faults(batch, status)
    yield from _seal_faults(batch, status)
    yield from _count_faults(batch, status)
    yield from _file_faults(batch)


def _time_faults(batch: BatchFacts, status: BatchStatus) -> Iterator[Fault]:
    for column in _REQUIRED[status]:
        if getattr(batch, column) is None:
            yield _fault(
                batch, f"is {status} and has no {column}", batch.update(**{column: _LATEST})
            )
    foreign = [column for column in _ENDS if column != TIMESTAMP_COLUMN[status]]
    for column in (*_FORBIDDEN[status], *foreign):
        if getattr(batch, column) is not None:
            yield _fault(batch, f"is {status} and has a {column}", batch.update(**{column: None}))


def _seal_faults(batch: BatchFacts, status: BatchStatus) -> Iterator[Fault]:
    sealed = batch.sealed_ms is not None
    outcome = batch.seal_outcome
    if sealed != (outcome is not None):
        yield _fault(
            batch,
            "is half sealed: of sealed_ms and seal_outcome only one is set",
            batch.update(sealed_ms=None, seal_outcome=None) if not batch.is_ended else "",
        )
    elif sealed and status in (_S.VALIDATING, _S.IN_PROGRESS):
        yield _fault(
            batch,
            f"is {status} and sealed, so that it takes no results and never ends",
            batch.update(sealed_ms=None, seal_outcome=None),
        )
    elif not sealed and (batch.is_ended or status is _S.FINALIZING):
        guess = "completed" if status is _S.FINALIZING else str(status)
        yield _fault(
            batch,
            f"is {status} and not sealed",
            batch.update(sealed_ms=Sql(f"{_LATEST} * 1000"), seal_outcome=guess),
        )
    elif sealed and batch.is_ended and status is not _S.CANCELLED and outcome != status:
        yield _fault(
            batch,
            f"is {status}, but was sealed as {outcome}",
            batch.update(seal_outcome=str(status)),
        )


def _count_faults(batch: BatchFacts, status: BatchStatus) -> Iterator[Fault]:
    total, done = batch.lines_total, batch.lines_done
    counts = {
        "lines_total": total,
        "lines_cut": batch.lines_cut,
        "lines_done": done,
        "completed": batch.completed,
        "failed": batch.failed,
    }
    for name, count in counts.items():
        if not 0 <= count <= total:
            yield _fault(batch, f"has {name} {count} of {total} lines", "")
            return
    if batch.completed + batch.failed > done and batch.is_ended:
        yield _fault(
            batch,
            f"has {batch.completed} completed and {batch.failed} failed, but {done} lines done",
            batch.update(lines_done=Sql("completed + failed")),
        )
    if status is _S.COMPLETED and done != total:
        yield _fault(
            batch,
            f"is completed with {done} of {total} lines done",
            batch.update(lines_done=Sql("lines_total")),
        )
    if status is _S.COMPLETED and batch.completed + batch.failed != total:
        yield _fault(
            batch,
            f"is completed with {total} lines, but {batch.completed} completed and"
            f" {batch.failed} failed",
            batch.update(failed=Sql("lines_total - completed")),
        )


def _file_faults(batch: BatchFacts) -> Iterator[Fault]:
    """The output file holds what completed, the error file all else; there is no empty one."""
    missing = batch.lines_total - batch.completed
    for column, lines in (("output_file_id", batch.completed), ("error_file_id", missing)):
        named = getattr(batch, column) is not None
        if named and not batch.is_ended:
            yield _fault(batch, f"is {batch.status} and has an {column} already", "")
        elif batch.is_ended and named != bool(lines):
            yield _fault(
                batch,
                f"has {'an' if named else 'no'} {column}, with {lines} lines for it",
                "",
            )


def _fault(batch: BatchFacts, what: str, sql: str) -> Fault:
    mend = (
        _BY_HAND
        if sql
        else "No statement can tell what it was: restore nightshift.db from a backup, or run the "
        "batch's input again as another batch and leave this one."
    )
    return Fault(subject=batch.id, what=what, mend=mend, sql=sql)
