"""The store in memory, as simple as can be: what its doors must say, whatever happened before.

Times are the store's milliseconds. A chunk or attempt has no name while the answer that told it
was lost. Nothing here knows of transactions, blobs or processes: a step happens at once or not at
all.

Lines that died in an engine are put apart by rules that have tests of their own. Here a batch that
saw that is `shaken`: which chunk holds a line is then the store's to say, all else stays exact.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from protos.nightshift.v1 import dispatch_pb2, work_pb2
from services.store.domain.state import TERMINAL, BatchStatus

LEASE_MS: Final = 15_000
STOP_MS: Final = 2_000
UNOPENED_MS: Final = 2_000
SILENT_MS: Final = 5_000
UNSEEN_DEATHS: Final = 3
_SECOND_MS: Final = 1_000
_GIVEN_UP: Final = 0
_DROPS: Final = {
    BatchStatus.CANCELLED: work_pb2.DROP_REASON_CANCELLED,
    BatchStatus.EXPIRED: work_pb2.DROP_REASON_EXPIRED,
    BatchStatus.COMPLETED: work_pb2.DROP_REASON_DONE,
}


@dataclass(frozen=True)
class Moment:
    """When a store does something, and since when it has heard of executors without a gap."""

    now_ms: int
    since_ms: int

    def end_ms(self, until_ms: int) -> int:
        """When a lease lapses; one that was given up has."""
        return until_ms and max(until_ms, self.since_ms + LEASE_MS)

    def live(self, until_ms: int) -> bool:
        """Whether a lease has not lapsed."""
        return self.end_ms(until_ms) > self.now_ms

    def silent(self, until_ms: int) -> bool:
        """Whether its holder was not heard for so long that it is taken for lost."""
        return self.end_ms(until_ms) - LEASE_MS <= self.now_ms - SILENT_MS


@dataclass(frozen=True)
class Outcome:
    """The first durable result of a line."""

    failed: bool
    answer: str


@dataclass(frozen=True)
class Delivery:
    """What an executor tells of a message that it got."""

    dispatch: int
    executor: str
    incarnation: str
    number: int


@dataclass(eq=False)
class Attempt:
    """One delivery of a chunk."""

    chunk: "Chunk"
    delivery: "Delivery"
    opened_ms: int
    until_ms: int
    lines: set[int]
    token: str = ""
    open: bool = True

    @property
    def dispatch(self) -> int:
        """Which dispatch of its chunk it is of."""
        return self.delivery.dispatch

    def keeps_off(self, delivery: Delivery, at: Moment) -> bool:
        """Whether it goes on, so that another delivery must wait."""
        if delivery.number <= 1:
            return at.live(self.until_ms)
        # Where the store was away, the message may have come again for that only.
        return self.opened_ms < at.since_ms and not at.silent(self.until_ms)


@dataclass(eq=False)
class Chunk:
    """Lines handed out together."""

    batch: "Batch"
    lines: set[int]
    dispatched_ms: int
    id: str = ""
    dispatch: int = 1
    until_ms: int | None = None
    done: bool = False
    deaths: int = 0
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def left(self) -> set[int]:
        """Its lines without a result."""
        return self.lines - self.batch.first.keys()

    def opened(self) -> list[Attempt]:
        """Its open attempts, by number."""
        return [attempt for attempt in self.attempts if attempt.open]

    def lose(self, lost: Iterable[Attempt], *, seen: bool = False) -> None:
        """Close attempts with nothing in their engines; what is left waits for a dispatch.

        Where nobody saw what was in the engine, all is suspected after a few times.
        """
        for attempt in lost:
            attempt.open = False
            if self.done or attempt.dispatch != self.dispatch or not self.batch.runs_on:
                continue
            self.lines, self.until_ms = self.left, _GIVEN_UP
            self.done = not self.lines
            self.deaths += not seen
            self.batch.shaken |= self.deaths >= UNSEEN_DEATHS


@dataclass(eq=False)
class Batch:
    """One batch.

    `outcome`: where it goes since it was sealed. `claimed_until_ms`: until when a store that is
    dead or frozen may hold the right to finalize it.
    """

    total: int
    expires_ms: int
    file_id: str
    key: str
    id: str = ""
    status: BatchStatus = BatchStatus.VALIDATING
    stopping_ms: int | None = None
    outcome: BatchStatus | None = None
    cut: int = 0
    shaken: bool = False
    claimed_until_ms: int = 0
    first: dict[int, Outcome] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    path: list[BatchStatus] = field(default_factory=lambda: [BatchStatus.VALIDATING])

    def enter(self, status: BatchStatus) -> None:
        """Move on."""
        self.status = status
        self.path.append(status)

    @property
    def ended(self) -> bool:
        """Whether nothing happens to it any more."""
        return self.status in TERMINAL

    @property
    def runs_on(self) -> bool:
        """Whether it is neither stopping nor sealed."""
        return self.stopping_ms is None and self.outcome is None

    def runs(self, now_ms: int) -> bool:
        """Whether its lines may be started."""
        return self.status is BatchStatus.IN_PROGRESS and self.runs_on and now_ms < self.expires_ms

    @property
    def counts(self) -> tuple[int, int, int]:
        """Total, completed and failed, as they are shown."""
        failed = sum(each.failed for each in self.first.values())
        never_validated = BatchStatus.IN_PROGRESS not in self.path
        return (0 if never_validated else self.total, len(self.first) - failed, failed)

    def seal(self, outcome: BatchStatus) -> None:
        """Take no more results."""
        self.outcome = outcome
        if outcome is not BatchStatus.CANCELLED:
            self.enter(BatchStatus.FINALIZING)
        for chunk in self.chunks:
            chunk.done = True
            for attempt in chunk.opened():
                attempt.open = False


@dataclass
class Model:
    """All of a store."""

    batches: list[Batch] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    # --- users --------------------------------------------------------------------------------

    def cancel(self, batch: Batch, at: Moment) -> bool:
        """Cancel; False is a conflict."""
        if batch.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            return True
        if batch.ended:
            return False
        batch.enter(BatchStatus.CANCELLING)
        batch.stopping_ms = at.now_ms
        return True

    # --- scheduler ----------------------------------------------------------------------------

    def make_chunk(self, batch: Batch, most: int, at: Moment) -> Chunk | None:
        """Cut the next lines."""
        if not batch.runs(at.now_ms) or batch.cut == batch.total:
            return None
        end = min(batch.total, batch.cut + most)
        chunk = Chunk(batch, set(range(batch.cut, end)), at.now_ms)
        batch.cut = end
        batch.chunks.append(chunk)
        return chunk

    def reclaim(self, at: Moment) -> list[Chunk]:
        """Raise what has no live lease, in order; batches that are shaken are left out."""
        raised = []
        for batch in self.batches:
            if not batch.runs(at.now_ms):
                continue
            for chunk in sorted(batch.chunks, key=lambda each: min(each.lines, default=0)):
                if chunk.done:
                    continue
                lapsed = chunk.until_ms is not None and not at.live(chunk.until_ms)
                lost = chunk.until_ms is None and chunk.dispatched_ms <= at.now_ms - UNOPENED_MS
                if lapsed:
                    chunk.lose(chunk.opened())
                if (lapsed or lost) and not chunk.done:
                    raised.append(chunk)
        raised = [chunk for chunk in raised if not chunk.batch.shaken]
        for chunk in raised:
            chunk.dispatch += 1
            chunk.dispatched_ms, chunk.until_ms = at.now_ms, None
        return raised

    def chunk_of(self, told: dispatch_pb2.Dispatch) -> Chunk:
        """Return the chunk of a message; one whose name was lost is known by its lines."""
        (batch,) = (each for each in self.batches if each.id == told.batch_id)
        lines = {line for part in told.lines for line in range(part.first, part.first + part.count)}
        for chunk in batch.chunks:
            if chunk.id == told.chunk_id or (not chunk.id and chunk.lines == lines):
                chunk.id = told.chunk_id
                return chunk
        assert batch.shaken, f"nobody cut {told}"
        chunk = Chunk(batch, lines, 0, id=told.chunk_id, dispatch=told.dispatch)
        batch.chunks.append(chunk)
        return chunk

    # --- executors ----------------------------------------------------------------------------

    def open(self, chunk: Chunk, delivery: Delivery, at: Moment) -> Attempt | str:
        """Open an attempt, or say `gone` or `busy`."""
        if not chunk.batch.runs(at.now_ms) or chunk.done or chunk.dispatch != delivery.dispatch:
            return "gone"
        for other in chunk.opened():
            if at.live(other.until_ms) and other.delivery == delivery:
                return other
            if other.keeps_off(delivery, at):
                return "busy"
        chunk.lose([each for each in chunk.opened() if at.silent(each.until_ms)])
        for attempt in chunk.opened():
            attempt.open = False
        if not chunk.left:
            chunk.done = True
        if chunk.done:
            return "gone"
        until_ms = at.now_ms + LEASE_MS
        attempt = Attempt(chunk, delivery, at.now_ms, until_ms, set(chunk.left))
        chunk.attempts.append(attempt)
        chunk.until_ms = until_ms
        return attempt

    def append(
        self, attempt: Attempt, results: Iterable[tuple[int, Outcome]], at: Moment
    ) -> int | None:
        """Record what is first; return how many were, None where the batch takes no more."""
        chunk = attempt.chunk
        batch = chunk.batch
        if batch.outcome is not None:
            return None
        before = len(batch.first)
        for line, outcome in results:
            batch.first.setdefault(line, outcome)
        if chunk.done or chunk.left:
            self._keep_alive(attempt, at.now_ms)
        else:
            chunk.done = True
            for each in chunk.opened():
                each.open = False
        if len(batch.first) == batch.total:
            cancelled = batch.status is BatchStatus.CANCELLING
            batch.seal(BatchStatus.CANCELLED if cancelled else BatchStatus.COMPLETED)
        return len(batch.first) - before

    def _keep_alive(self, attempt: Attempt, now_ms: int) -> None:
        chunk = attempt.chunk
        until_ms = now_ms + LEASE_MS
        if (
            chunk.dispatch == attempt.dispatch
            and chunk.until_ms is not None
            and now_ms < chunk.until_ms < until_ms - _SECOND_MS
        ):
            self._extend(attempt, until_ms)

    def _extend(self, attempt: Attempt, until_ms: int) -> None:
        if attempt.open:
            attempt.until_ms = until_ms
        if attempt.dispatch == attempt.chunk.dispatch and not attempt.chunk.done:
            attempt.chunk.until_ms = until_ms

    def beat(self, attempt: Attempt, at: Moment) -> set[int]:
        """Keep an attempt alive; return why it must be dropped, empty where it goes on."""
        chunk, batch = attempt.chunk, attempt.chunk.batch
        if batch.outcome is not None:
            # Its rows go soon after its end; what is unknown is done.
            gone = {int(work_pb2.DROP_REASON_DONE)} if batch.ended else set()
            return {_DROPS[batch.outcome]} | gone
        if batch.stopping_ms is not None:
            cancelled = batch.status is BatchStatus.CANCELLING
            return {_DROPS[BatchStatus.CANCELLED if cancelled else BatchStatus.EXPIRED]}
        if chunk.done:
            return {work_pb2.DROP_REASON_DONE}
        if not attempt.open or chunk.dispatch != attempt.dispatch:
            return {work_pb2.DROP_REASON_SUPERSEDED}
        self._extend(attempt, at.now_ms + LEASE_MS)
        return set()

    def hand_back(self, attempt: Attempt, executor: str) -> None:
        """Give an attempt up, if it is this executor's."""
        chunk = attempt.chunk
        if not attempt.open or attempt.delivery.executor != executor:
            return
        attempt.open = False
        if chunk.dispatch == attempt.dispatch and not chunk.done and chunk.until_ms is not None:
            chunk.until_ms = _GIVEN_UP

    def lose(self, lost: Collection[Attempt], *, seen: bool) -> None:
        """Attempts ended, nothing in their engines, as was seen or not."""
        for attempt in lost:
            if attempt.open:
                attempt.chunk.lose([attempt], seen=seen)

    # --- the store's own loops ----------------------------------------------------------------

    def validate(self, there: Mapping[str, bool]) -> None:
        """Judge every batch that waits: its file is there or it is not.

        `there` says so of batches (by key) that were looked at earlier.
        """
        for batch in self.batches:
            if batch.status is BatchStatus.VALIDATING:
                sound = there.get(batch.key, batch.file_id in self.files)
                batch.enter(BatchStatus.IN_PROGRESS if sound else BatchStatus.FAILED)

    def stop_late(self, at: Moment) -> None:
        """Stop what is past its time."""
        for batch in self.batches:
            if batch.expires_ms > at.now_ms or batch.stopping_ms is not None:
                continue
            if batch.status is BatchStatus.VALIDATING:
                batch.outcome = BatchStatus.EXPIRED
                batch.enter(BatchStatus.EXPIRED)
            elif batch.status is BatchStatus.IN_PROGRESS:
                batch.stopping_ms = at.now_ms

    def seal_stopped(self, at: Moment, sealed: Collection[str]) -> None:
        """Seal what has stopped, or had its time to; `sealed` tells of those that are shaken."""
        for batch in self.batches:
            if batch.stopping_ms is None or batch.outcome is not None:
                continue
            waits = any(at.live(each.until_ms) for chunk in batch.chunks for each in chunk.opened())
            if batch.shaken:
                waits = batch.id not in sealed
            if batch.stopping_ms + STOP_MS <= at.now_ms or not waits:
                cancelled = batch.status is BatchStatus.CANCELLING
                batch.seal(BatchStatus.CANCELLED if cancelled else BatchStatus.EXPIRED)

    def finalize(self, at: Moment, ended: Collection[str]) -> None:
        """End what is sealed; `ended` tells of what another store may hold."""
        for batch in self.batches:
            if batch.outcome is None or batch.ended:
                continue
            if at.now_ms < batch.claimed_until_ms and batch.id not in ended:
                continue
            cancelled = batch.status is BatchStatus.CANCELLING
            batch.enter(BatchStatus.CANCELLED if cancelled else batch.outcome)
