"""The simulated engine: true seats, queue, delays and deaths; invented answers.

It is what faults are tried with from outside, and never offered as a real engine: its
`system_fingerprint` is `simulated`. Only time is simulated here, what is said is in
`simulated_answers`.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

from services.executor.engines.base import (
    STALL_LIMIT_SECONDS,
    Answer,
    EngineDead,
    EngineError,
    EngineRequest,
    EngineResponse,
    RequestAborted,
)
from services.executor.engines.bodies.bounds import BodyRefused
from services.executor.engines.simulated.answers import Faults, answer, fast_chat, read_body
from services.executor.engines.simulated.started_log import StartedFile
from services.executor.engines.simulated.texts import MAX_WORDS
from services.kit.wire.endpoints import ENDPOINTS

DEFAULT_SEATS = 64
_VERSION = "1"


class _Line:
    """A request that could not be answered at once."""

    __slots__ = ("faults", "future", "request", "timer")

    def __init__(
        self, request: EngineRequest, faults: Faults, future: asyncio.Future[EngineResponse]
    ) -> None:
        self.request = request
        self.faults = faults
        self.future = future
        self.timer: asyncio.TimerHandle | None = None


class SimulatedEngine:
    """Runs `seats` requests at once, the rest queue in order of submission.

    Lines without `x_simulate` are answered inside `submit_many`, without a future, as long as
    a seat is free. A line's delay comes first, then its fault.
    """

    name = "simulated"
    endpoints = frozenset(ENDPOINTS)
    context_length: int | None = MAX_WORDS

    def __init__(
        self,
        *,
        seats: int = DEFAULT_SEATS,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        started: StartedFile | None = None,
    ) -> None:
        if seats < 1:
            raise ValueError("seats must be at least 1")
        self.seats = seats
        self.revision = sha256(f"simulated {_VERSION} seats={seats}".encode()).hexdigest()[:16]
        self._clock = clock
        self._wall_clock = wall_clock
        self._started = started
        self._running = False
        self._stuck = False
        self._last_step_at = clock()
        self._lines: dict[str, _Line] = {}
        self._seated: set[str] = set()
        self._queue: OrderedDict[str, None] = OrderedDict()

    @property
    def in_flight(self) -> int:
        """Queued and seated requests."""
        return len(self._lines)

    @property
    def stall_limit_seconds(self) -> float:
        """It steps all the time."""
        return STALL_LIMIT_SECONDS

    @property
    def last_step_at(self) -> float:
        """Monotonic seconds; now, unless the whole engine hangs."""
        if not self._stuck:
            self._last_step_at = self._clock()
        return self._last_step_at

    def stalled_seconds(self) -> float:
        """Seconds since the whole engine hung, while work waits."""
        if not self._stuck or not self._lines:
            return 0.0
        return self._clock() - self._last_step_at

    def check_health(self) -> None:
        """Raise `EngineDead` unless started and alive. A hanging engine looks healthy."""
        if not self._running:
            raise EngineDead("the simulated engine is not running")

    async def start(self) -> None:
        """Start, or start anew after a death or hang."""
        await self.close()
        self._running = True
        self._stuck = False

    async def close(self) -> None:
        """Abort what is in flight."""
        self._stop(RequestAborted, "the engine was closed")

    def submit(self, request: EngineRequest) -> asyncio.Future[EngineResponse]:
        """Answer one request."""
        [result] = self.submit_many([request])
        if isinstance(result, EngineResponse):
            future: asyncio.Future[EngineResponse] = asyncio.get_running_loop().create_future()
            future.set_result(result)
            return future
        assert isinstance(result, asyncio.Future)
        return result

    def submit_many(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        """Answer many, in order; what needs no seat is a plain value."""
        created = int(self._wall_clock())
        answers: list[Answer] = []
        for request in requests:
            # Nothing overtakes: a plain line waits behind those that queue for a seat.
            free = self._running and not self._stuck and len(self._seated) < self.seats
            response = fast_chat(request, created) if free else None
            answers.append(response if response is not None else self._submit_slowly(request))
        if self._started is not None:
            pairs = zip(requests, answers, strict=True)
            self._started.note([one for one, given in pairs if isinstance(given, EngineResponse)])
        return answers

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Free the seats of these; their awaitables raise `RequestAborted`."""
        for request_id in request_ids:
            line = self._take(request_id)
            if line is not None:
                _fail(line.future, RequestAborted(request_id))
        self._fill_seats()

    def _submit_slowly(self, request: EngineRequest) -> Answer:
        future: asyncio.Future[EngineResponse] = asyncio.get_running_loop().create_future()
        if not self._running:
            _fail(future, EngineDead("the simulated engine is not running"))
            return future
        if request.request_id in self._lines:
            raise ValueError(f"request id {request.request_id} is in flight already")
        try:
            _, faults = read_body(request)
        except BodyRefused as refused:
            return refused.response
        free = not self._stuck and len(self._seated) < self.seats
        if free and not faults.takes_time(request.attempt):
            return answer(request, int(self._wall_clock()))
        self._lines[request.request_id] = _Line(request, faults, future)
        future.add_done_callback(lambda _: self._forget(request.request_id, future))
        self._queue[request.request_id] = None
        self._fill_seats()
        return future

    def _fill_seats(self) -> None:
        while self._queue and self._running and not self._stuck and len(self._seated) < self.seats:
            request_id, _ = self._queue.popitem(last=False)
            line = self._lines[request_id]
            self._seated.add(request_id)
            if self._started is not None:
                self._started.note([line.request])
            delay_ms = line.faults.delay_ms
            if delay_ms:
                loop = asyncio.get_running_loop()
                line.timer = loop.call_later(delay_ms / 1000, self._step, request_id)
            else:
                self._act(request_id, line)

    def _step(self, request_id: str) -> None:
        """A delay has passed. A hanging engine makes nothing of it."""
        line = self._lines.get(request_id)
        if line is not None and not self._stuck:
            self._act(request_id, line)
            self._fill_seats()

    def _act(self, request_id: str, line: _Line) -> None:
        faults = line.faults
        if line.request.attempt <= faults.crash:
            self._stop(EngineDead, "the simulated engine crashed")
        elif faults.hang_engine:
            self._last_step_at = self._clock()
            self._stuck = True
        elif not faults.hang:
            self._take(request_id)
            if not line.future.done():
                line.future.set_result(answer(line.request, int(self._wall_clock())))

    def _take(self, request_id: str) -> _Line | None:
        line = self._lines.pop(request_id, None)
        self._seated.discard(request_id)
        self._queue.pop(request_id, None)
        if line is not None and line.timer is not None:
            line.timer.cancel()
        return line

    def _forget(self, request_id: str, future: asyncio.Future[EngineResponse]) -> None:
        """The caller cancelled its awaitable: the seat is free for the next."""
        line = self._lines.get(request_id)
        if line is not None and line.future is future:
            self._take(request_id)
            self._fill_seats()

    def _stop(self, error: type[EngineError], message: str) -> None:
        self._running = False
        lines = list(self._lines.values())
        self._lines.clear()
        self._seated.clear()
        self._queue.clear()
        for line in lines:
            if line.timer is not None:
                line.timer.cancel()
            _fail(line.future, error(message))


def _fail(future: asyncio.Future[EngineResponse], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # an awaitable left unawaited is no fault: nothing is to be logged
