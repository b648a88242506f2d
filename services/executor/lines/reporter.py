"""Result frames to the store: one stream for all attempts, resent until acknowledged."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

import prometheus_client

from protos.nightshift.v1 import work_pb2
from services.executor.attempts import Attempt, Attempts
from services.executor.engines.base import NO_USAGE, Usage
from services.executor.lines.retry import Backoff
from services.executor.result_frames import RESULT_FRAME_BYTES, Frame, error_instead
from services.executor.store_client import StoreClient
from services.kit.calls.rpc import CallFault, StreamEnd
from services.kit.process import failpoints
from services.kit.process.clock import Clock
from services.kit.process.log import get_logger
from services.kit.wire.errors import (
    AuthenticationError,
    InvalidRequestError,
    MethodNotAllowedError,
    NightshiftError,
    PermissionError_,
    RateLimitedError,
    TooLargeError,
    UnavailableError,
    from_rpc_error,
)
from services.kit.wire.frames import FAILED_FLAG

_log = get_logger(__name__)

MAX_PENDING_BYTES: Final = 32 * 1024 * 1024
"""Results that may wait for the store; above it the engine gets no more lines."""
FLUSH_SECONDS: Final = 0.75
"""Age at which results of a slow engine are sent, however few they are."""
FLUSH_TICK_SECONDS: Final = 0.2
IDLE_SECONDS: Final = 60.0
"""A stream on which nothing moves for this long, in either direction, is opened anew."""
MAX_REFUSALS: Final = 3
"""A frame that the store has refused so often is sent no more as it is; see `Frame.instead`."""
MAX_FAULTS: Final = 10
"""The same where the store says that the fault is its own, which may pass."""
_OF_NO_FRAME: Final = (
    UnavailableError,
    RateLimitedError,
    AuthenticationError,
    PermissionError_,
    MethodNotAllowedError,
)
"""What a stream ends with whatever is sent on it; the results wait."""

_LINES = prometheus_client.Counter(
    "nightshift_executor_lines_total", "Lines with a result, by outcome.", ["outcome"]
)
_COMPLETED = _LINES.labels("completed")
_FAILED = _LINES.labels("failed")
_FRAMES = prometheus_client.Counter(
    "nightshift_executor_frames_total", "Result frames acknowledged by the store."
)
_PENDING = prometheus_client.Gauge(
    "nightshift_executor_pending_result_bytes", "Result bytes that are not durable yet."
)


class Reporter:
    """Sends what attempts finish and hears what became durable."""

    def __init__(
        self,
        *,
        store: StoreClient,
        attempts: Attempts,
        clock: Clock,
        chance: Callable[[], float],
        on_durable: Callable[[Attempt], None],
        on_sealed: Callable[[Attempt], None],
        on_refused: Callable[[Attempt, str], None],
    ) -> None:
        """Make a reporter that is not connected.

        Args:
            store: where results go.
            attempts: whose results are sent when they get old.
            clock: measures their age.
            chance: random numbers in [0, 1), for jitter.
            on_durable: called when no result of an attempt waits any more.
            on_sealed: called when the attempt's batch takes no more results.
            on_refused: called with the reason when the store takes not even an error as the result
                of one of the attempt's lines.
        """
        self._store = store
        self._attempts = attempts
        self._clock = clock
        self._on_durable = on_durable
        self._on_sealed = on_sealed
        self._on_refused = on_refused
        self._backoff = Backoff(0.05, 1.0, chance)
        self._unsent: deque[Frame] = deque()
        self._unacked: deque[Frame] = deque()
        self._work = asyncio.Event()
        self._stream = 0
        self._patience: asyncio.Timeout | None = None
        self._pending_bytes = 0
        self._on_room: Callable[[], None] = lambda: None

    @property
    def full(self) -> bool:
        """Whether so much waits for the store that nothing more should be made."""
        return self._pending_bytes > MAX_PENDING_BYTES

    def on_room(self, call: Callable[[], None]) -> None:
        """Have `call` called when it is no longer full."""
        self._on_room = call

    def add(self, attempt: Attempt, line: int, text: bytes, flags: int, usage: Usage) -> None:
        """Take a result line; it is sent with others, or when it gets old.

        One that is longer than the store takes becomes an error.
        """
        most = self._store.max_result_bytes
        if len(text) > most:
            batch_id = attempt.dispatch.batch_id
            _log.warning("result_too_large", batch=batch_id, line=line, bytes=len(text), most=most)
            error = TooLargeError(f"A result may have at most {most} bytes.")
            text, flags = error_instead(batch_id, line, text, error), FAILED_FLAG
            # As of any line without an answer: a batch's usage is that of its files.
            usage = NO_USAGE
        (_FAILED if flags else _COMPLETED).inc()
        results = attempt.results
        if not results.fits(text):
            self.send(attempt)
        if not len(results):
            results.since = self._clock.monotonic()
        results.add(line, text, flags, usage)
        if results.size > RESULT_FRAME_BYTES:
            # It goes alone, and counts at once as what waits for the store.
            self.send(attempt)

    def send(self, attempt: Attempt) -> None:
        """Send what the attempt has finished, without waiting for more."""
        if not len(attempt.results):
            return
        self._put(attempt.results.take(attempt))

    def _put(self, frame: Frame) -> None:
        frame.attempt.unacked_frames += 1
        frame.attempt.quiet.clear()
        self._pending_bytes += len(frame.payload)
        _PENDING.set(self._pending_bytes)
        self._unsent.append(frame)
        self._work.set()

    async def flush(self, attempts: list[Attempt], within_seconds: float) -> bool:
        """Send all results of these and wait until they are durable; False when it took longer."""
        for attempt in attempts:
            self.send(attempt)
        try:
            async with asyncio.timeout(within_seconds):
                for attempt in attempts:
                    await attempt.quiet.wait()
        except TimeoutError:
            return False
        return True

    async def send_old(self) -> None:
        """Send results that have waited long enough for company."""
        before = self._clock.monotonic() - FLUSH_SECONDS
        for attempt in self._attempts:
            if len(attempt.results) and attempt.results.since <= before:
                self.send(attempt)

    async def run(self) -> None:
        """Keep a stream to the store while there is something to say, until cancelled."""
        while True:
            while not self._unsent and not self._unacked:
                self._work.clear()
                await self._work.wait()
            refusal: NightshiftError | None = None
            try:
                await self._run_stream()
            except CallFault as fault:
                error = from_rpc_error(fault)
                if self._unacked and not isinstance(error, _OF_NO_FRAME):
                    refusal = error
                _log.warning("result_stream_failed", error=str(error))
            except TimeoutError:
                _log.warning("result_stream_silent", frames=len(self._unacked))
            # What was not acknowledged goes first on the next stream; the store sorts repeats out.
            self._stream += 1
            self._unsent.extendleft(reversed(self._unacked))
            self._unacked.clear()
            if refusal is not None:
                self._refused(self._unsent.popleft(), refusal)
            self._work.set()
            await asyncio.sleep(self._backoff.next_seconds())

    async def _run_stream(self) -> None:
        """One stream, until it ends.

        Raises:
            CallFault: the store ended it with an error, or is away.
            TimeoutError: nothing moved for `IDLE_SECONDS`.
        """
        self._stream += 1
        call = self._store.append_results(self._messages(self._stream))
        end = StreamEnd(call)
        answers = aiter(call)
        try:
            while True:
                try:
                    answer = await self._next(answers)
                except TimeoutError:
                    if not self._unacked and not self._unsent:
                        return
                    raise
                if answer is None:
                    return
                self._acknowledged(answer)
        except CallFault as fault:
            # Taken as it comes, a store that is away would nearly always count as one that refuses.
            raise await end.fault(fault) from None
        finally:
            # Leaving the loop alone would leave the call open.
            call.cancel()

    async def _next(
        self, answers: AsyncIterator[work_pb2.AppendResultsResponse]
    ) -> work_pb2.AppendResultsResponse | None:
        async with asyncio.timeout(IDLE_SECONDS) as patience:
            self._patience = patience
            try:
                return await anext(answers, None)
            finally:
                self._patience = None

    async def _messages(self, stream: int) -> AsyncIterator[work_pb2.AppendResultsRequest]:
        number = 0
        while stream == self._stream:
            if not self._unsent:
                self._work.clear()
                await self._work.wait()
                continue
            failpoints.before("results.send")
            frame = self._unsent.popleft()
            number += 1
            frame.number = number
            self._unacked.append(frame)
            for message in frame.messages():
                yield message
                self._moved()
            failpoints.after("results.send")

    def _moved(self) -> None:
        """The store took a message: a long frame may be long under way to its acknowledgement."""
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(asyncio.get_running_loop().time() + IDLE_SECONDS)

    def _acknowledged(self, answer: work_pb2.AppendResultsResponse) -> None:
        self._backoff.reset()
        with failpoints.around("results.acknowledged"):
            self._take_off(answer)

    def _take_off(self, answer: work_pb2.AppendResultsResponse) -> None:
        while self._unacked and self._unacked[0].number <= answer.frame:
            frame = self._unacked.popleft()
            _FRAMES.inc()
            if answer.sealed and frame.number == answer.frame:
                self._settled(frame)
                self._on_sealed(frame.attempt)
            else:
                self._settled(frame)

    def _settled(self, frame: Frame) -> None:
        was_full = self.full
        attempt = frame.attempt
        self._pending_bytes -= len(frame.payload)
        _PENDING.set(self._pending_bytes)
        attempt.unacked_frames -= 1
        if not attempt.unacked_frames:
            attempt.quiet.set()
            if not len(attempt.results):
                self._on_durable(attempt)
        if was_full and not self.full:
            self._on_room()

    def _refused(self, frame: Frame, error: NightshiftError) -> None:
        """Send a frame again that the stream broke at, after the others; in the end, an error."""
        frame.failures += 1
        most = MAX_REFUSALS if isinstance(error, InvalidRequestError) else MAX_FAULTS
        attempt = frame.attempt
        if frame.failures < most and not attempt.closed:
            self._unsent.append(frame)
            return
        _log.error(
            "results_refused",
            chunk=attempt.dispatch.chunk_id,
            lines=frame.lines,
            error=error.message,
        )
        instead = frame.instead(error)
        if not instead:
            # Ended first: what is dropped now must not count as durable.
            self._on_refused(attempt, error.message)
        for each in instead:
            self._put(each)
        self._settled(frame)
