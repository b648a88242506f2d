"""What the store in memory is made of; see `store_model`. Times are the store's milliseconds."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from services.store.domain.state import TERMINAL, BatchStatus

LEASE_MS: Final = 15_000
SILENT_MS: Final = 5_000
UNSEEN_DEATHS: Final = 3
GIVEN_UP: Final = 0


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
    expected: int = 0
    """Number of the delivery that comes because an earlier one was told to wait."""

    @property
    def dispatch(self) -> int:
        """Which dispatch of its chunk it is of."""
        return self.delivery.dispatch

    def repeated(self, delivery: Delivery) -> bool:
        """Whether a delivery says nothing of its holder."""
        return delivery.number <= max(1, self.delivery.number, self.expected)

    def is_for(self, delivery: Delivery) -> bool:
        """Whether a delivery is what it was opened for, once more."""
        ours, theirs = self.delivery, delivery
        same = (ours.dispatch, ours.executor, ours.incarnation) == (
            theirs.dispatch,
            theirs.executor,
            theirs.incarnation,
        )
        return same and self.repeated(delivery)

    def keeps_off(self, delivery: Delivery, at: Moment) -> bool:
        """Whether it goes on, so that another delivery must wait."""
        if self.repeated(delivery):
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
            self.lines, self.until_ms = self.left, GIVEN_UP
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
