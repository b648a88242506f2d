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
from services.store.domain.state import BatchStatus
from tests.kit.store_model_parts import (
    GIVEN_UP,
    LEASE_MS,
    Attempt,
    Batch,
    Chunk,
    Delivery,
    Moment,
    Outcome,
)

STOP_MS: Final = 2_000
UNOPENED_MS: Final = 2_000
_SECOND_MS: Final = 1_000
_DROPS: Final = {
    BatchStatus.CANCELLED: work_pb2.DROP_REASON_CANCELLED,
    BatchStatus.EXPIRED: work_pb2.DROP_REASON_EXPIRED,
    BatchStatus.COMPLETED: work_pb2.DROP_REASON_DONE,
}


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
        """Open an attempt, or say `gone` or `busy`; where this shakes its batch, nothing sure."""
        if not chunk.batch.runs(at.now_ms) or chunk.done or chunk.dispatch != delivery.dispatch:
            return "gone"
        for other in chunk.opened():
            if at.live(other.until_ms) and other.is_for(delivery):
                return other
            if other.keeps_off(delivery, at):
                if other.repeated(delivery):
                    other.expected = delivery.number + 1
                return "busy"
        self._lose_lives([each for each in chunk.opened() if at.silent(each.until_ms)], at)
        for attempt in chunk.opened():
            attempt.open = False
        if not chunk.left:
            chunk.done = True
        if chunk.done or chunk.batch.shaken:
            return "gone"
        until_ms = at.now_ms + LEASE_MS
        attempt = Attempt(chunk, delivery, at.now_ms, until_ms, set(chunk.left))
        chunk.attempts.append(attempt)
        chunk.until_ms = until_ms
        return attempt

    def _lose_lives(self, silent: Collection[Attempt], at: Moment) -> None:
        """Whoever fell silent is lost with all that it has and has not beaten for."""
        lives = {(each.delivery.executor, each.delivery.incarnation) for each in silent}
        for each in self._open_attempts():
            life = (each.delivery.executor, each.delivery.incarnation)
            if life in lives and at.silent(each.until_ms):
                each.chunk.lose([each])

    def lose_closed(self, still_open: Collection[tuple[str, Delivery]]) -> None:
        """Lose what a shaken batch took with it: `still_open` names chunk and delivery of others.

        Of a batch that is shaken only the store knows whose silence it met.
        """
        for each in self._open_attempts():
            known = each.chunk.id and not each.chunk.batch.shaken
            if known and (each.chunk.id, each.delivery) not in still_open:
                each.chunk.lose([each])

    def _open_attempts(self) -> list[Attempt]:
        return [each for batch in self.batches for chunk in batch.chunks for each in chunk.opened()]

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
            chunk.until_ms = GIVEN_UP

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
