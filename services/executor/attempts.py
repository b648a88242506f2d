"""The attempts that an executor holds: one for each delivery of a chunk, from pull to ack."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from opentelemetry import trace

from protos.nightshift.v1.dispatch_pb2 import Dispatch
from protos.nightshift.v1.work_pb2 import AttemptOpened
from services.executor.engines.base import EngineResponse
from services.executor.input_lines import Line
from services.executor.result_frames import ResultBuffer
from services.kit.messages.bus import Delivery
from services.kit.wire.ids import uuid7_hex


class Running:
    """A line that is in the engine."""

    __slots__ = ("attempt", "discard", "future", "line", "request_id", "started_at")

    def __init__(
        self,
        attempt: "Attempt",
        line: Line,
        request_id: str,
        future: asyncio.Future[EngineResponse],
        started_at: float,
    ) -> None:
        self.attempt = attempt
        self.line = line
        self.request_id = request_id
        self.future = future
        self.started_at = started_at
        """Monotonic seconds of its taking a seat; infinite while it waits for one inside."""
        self.discard = False
        """Set before it is aborted: whatever the engine returns for it is no result."""


class Attempt:
    """One delivery of a chunk.

    Its lines are in one of four places: still to be read, `ready`, `running` or `waiting` for a
    retry; `left` counts all of them. Finished ones are in `results`, then in frames at the
    reporter (`unacked_frames`), then durable.
    """

    __slots__ = (
        "answered_at",
        "bytes_left",
        "closed",
        "delivery",
        "dispatch",
        "kept_at",
        "left",
        "number",
        "order",
        "project_id",
        "queued",
        "quiet",
        "ready",
        "released",
        "request_prefix",
        "results",
        "running",
        "span",
        "token",
        "unacked_frames",
        "waiting",
    )

    def __init__(self, delivery: Delivery, order: int, now: float) -> None:
        self.delivery = delivery
        self.dispatch = delivery.dispatch
        """What the message says, until the store has opened the attempt and says better."""
        self.order = order
        """Place in the order of arrival: earlier ones get seats first."""
        self.left = delivery.dispatch.line_count
        self.bytes_left = delivery.dispatch.input_bytes
        self.token = ""
        """Empty until the store has opened the attempt."""
        self.number = 1
        """The attempt number that travels with its lines, from 1."""
        self.project_id = ""
        """Whose lines they are; known once the store has opened the attempt."""
        self.request_prefix = uuid7_hex()[-20:]
        """First 20 of the 32 hex digits that name a line's request to the engine."""
        self.ready: deque[Line] = deque()
        self.running: dict[str, Running] = {}
        self.waiting: set[asyncio.TimerHandle] = set()
        self.queued = False
        """Whether the runner knows that lines are ready."""
        self.results = ResultBuffer()
        self.unacked_frames = 0
        self.quiet = asyncio.Event()
        """Set whenever no frame of it waits for the store's word."""
        self.quiet.set()
        self.closed = False
        """Set once by whatever ends it; from then on no line of it starts or finishes."""
        self.answered_at = now
        """Monotonic seconds of the last word of the store about it."""
        self.kept_at = now
        """Monotonic seconds of the last word to the broker about it."""
        self.released = False
        """Set when its message was left to the broker while its lines run on."""
        self.span: trace.Span = trace.INVALID_SPAN

    def __lt__(self, other: "Attempt") -> bool:
        """Order by arrival."""
        return self.order < other.order

    @property
    def name(self) -> str:
        """The dispatch, as the scheduler names it."""
        return f"{self.dispatch.chunk_id}:{self.dispatch.dispatch}"

    def started_lines(self) -> list[int]:
        """Return the ordinals of the lines that are in the engine, ascending."""
        return sorted(run.line.number for run in self.running.values() if not run.discard)


class Attempts:
    """All attempts of this executor, in order of arrival."""

    def __init__(self) -> None:
        """Start with none."""
        self._all: dict[int, Attempt] = {}
        self._orders = 0
        self._opened: list[str] = []
        self._on_change: list[Callable[[], None]] = []
        self._alone: dict[int, Attempt] = {}
        self.held_lines = 0
        """Lines pulled and not finished."""
        self.held_bytes = 0.0
        """Input bytes of those lines, roughly: lines of a chunk count alike."""

    def __len__(self) -> int:
        """Return the number of attempts."""
        return len(self._all)

    def __iter__(self) -> Iterator[Attempt]:
        """Walk over a copy, in order of arrival."""
        return iter(list(self._all.values()))

    def on_change(self, call: Callable[[], None]) -> None:
        """Have `call` called when attempts come or go, or lines finish."""
        self._on_change.append(call)

    def changed(self) -> None:
        """Tell those who asked."""
        for call in self._on_change:
            call()

    def add(self, delivery: Delivery, now: float) -> Attempt:
        """Hold a delivery from now on; its lines count at once."""
        self._orders += 1
        attempt = Attempt(delivery, self._orders, now)
        self._all[attempt.order] = attempt
        if attempt.dispatch.alone:
            self._alone[attempt.order] = attempt
        self.held_lines += attempt.left
        self.held_bytes += attempt.bytes_left
        self._opened.append(attempt.name)
        self.changed()
        return attempt

    def believe(self, attempt: Attempt, opened: AttemptOpened) -> None:
        """Run its lines as the store says, whatever stood in the message from the bus."""
        attempt.token = opened.token
        attempt.project_id = opened.project_id
        if opened.endpoint:
            dispatch = Dispatch()
            dispatch.CopyFrom(attempt.dispatch)
            dispatch.batch_id = opened.batch_id
            dispatch.endpoint = opened.endpoint
            dispatch.model = opened.model
            dispatch.expires_at_ms = opened.expires_at_ms
            dispatch.alone = opened.alone
            attempt.dispatch = dispatch
        if attempt.dispatch.alone:
            self._alone[attempt.order] = attempt
        else:
            self._alone.pop(attempt.order, None)
        attempt.number = opened.deaths + 1 if attempt.dispatch.alone else max(1, opened.attempt)
        self.resize(attempt, sum(part.count for part in opened.lines))

    def resize(self, attempt: Attempt, lines: int) -> None:
        """Correct the number of lines left to what the store says."""
        before = attempt.left
        self.held_lines += lines - before
        bytes_now = int(attempt.bytes_left * lines / before) if before else 0
        self.held_bytes += bytes_now - attempt.bytes_left
        attempt.left = lines
        attempt.bytes_left = bytes_now

    def finished(self, attempt: Attempt, lines: int) -> None:
        """Count `lines` of it as finished; the caller announces the change."""
        share = attempt.bytes_left * lines // attempt.left
        attempt.left -= lines
        attempt.bytes_left -= share
        self.held_lines -= lines
        self.held_bytes -= share

    def remove(self, attempt: Attempt) -> None:
        """Hold it no longer; repeatable."""
        if self._all.pop(attempt.order, None) is not None:
            self.held_lines -= attempt.left
            self.held_bytes -= attempt.bytes_left
            self._alone.pop(attempt.order, None)
            self.changed()

    def take_opened(self) -> list[str]:
        """Return the dispatches pulled since the last call, as `chunk:dispatch`."""
        opened, self._opened = self._opened, []
        return opened

    @property
    def any_opened(self) -> bool:
        """Whether `take_opened` has something to tell."""
        return bool(self._opened)

    def open_ones(self) -> list[Attempt]:
        """Return those that the store knows and that are not ending."""
        return [one for one in self._all.values() if one.token and not one.closed]

    def of_batch(self, batch_id: str) -> list[Attempt]:
        """Return a batch's attempts."""
        return [one for one in self._all.values() if one.dispatch.batch_id == batch_id]

    def held(self, dispatch: Dispatch) -> Attempt | None:
        """Return the attempt of a dispatch that is held here and not ending, if there is one."""
        for one in self._all.values():
            name = one.dispatch.chunk_id, one.dispatch.dispatch
            if not one.closed and name == (dispatch.chunk_id, dispatch.dispatch):
                return one
        return None

    def first_alone(self) -> Attempt | None:
        """Return the attempt that must have the engine to itself, if there is one."""
        return next(iter(self._alone.values()), None)
