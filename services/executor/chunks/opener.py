"""Opens the attempts of what was pulled, and reads their lines."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

from opentelemetry import trace

from protos.nightshift.v1 import work_pb2
from services.executor.attempts import Attempt, Attempts
from services.executor.chunks.endings import Endings, Tasks
from services.executor.chunks.store_reach import Reach
from services.executor.input_lines import LineReader
from services.executor.lines.retry import Backoff
from services.executor.lines.runner import Runner
from services.executor.store_client import Range, StoreClient, without_first
from services.kit.calls.rpc import CallFault
from services.kit.messages.bus import ACK_WAIT_SECONDS
from services.kit.process import telemetry
from services.kit.process.clock import Clock
from services.kit.process.log import get_logger
from services.kit.wire.errors import ConflictError, LostError, UnavailableError, from_rpc_error

_log = get_logger(__name__)

OPEN_AT_ONCE: Final = 32
"""Attempts being opened or read at the same time."""
FRAME_WAIT_SECONDS: Final = 60.0
"""A stream of lines that says nothing for this long is read anew."""
READ_TRIES: Final = 5
_KNOWN: Final = (UnavailableError, LostError, ConflictError)
"""Faults of reading that the store knows of: it is away, or has closed the attempt."""
STALE_SECONDS: Final = ACK_WAIT_SECONDS - 1
"""A delivery that waited this long to be opened is the broker's again."""


class Opener:
    """Turns deliveries into attempts with lines."""

    def __init__(
        self,
        *,
        store: StoreClient,
        attempts: Attempts,
        endings: Endings,
        runner: Runner,
        tasks: Tasks,
        reach: Reach,
        clock: Clock,
        chance: Callable[[], float],
    ) -> None:
        """Make an opener; `chance` gives random numbers in [0, 1), for jitter."""
        self._store = store
        self._reach = reach
        self._attempts = attempts
        self._endings = endings
        self._runner = runner
        self._tasks = tasks
        self._clock = clock
        self._chance = chance
        self._opening = asyncio.Semaphore(OPEN_AT_ONCE)

    def open(self, attempt: Attempt) -> None:
        """Open an attempt in the background, read its lines and give them to the runner."""
        self._tasks.spawn(self._open(attempt))

    async def _open(self, attempt: Attempt) -> None:
        dispatch = attempt.dispatch
        attempt.span = telemetry.tracer.start_span(
            "run chunk",
            context=telemetry.context_of({"traceparent": dispatch.traceparent}),
            attributes={
                "nightshift.batch": dispatch.batch_id,
                "nightshift.chunk": dispatch.chunk_id,
                "nightshift.lines": dispatch.line_count,
            },
        )
        async with self._opening:
            if attempt.closed:
                # Ended while it waited: opened now, it would be held until somebody hands it back.
                return
            if self._clock.monotonic() - attempt.kept_at > STALE_SECONDS:
                self._endings.let_go(attempt)
                return
            with trace.use_span(attempt.span):
                # The store counts the lease from some moment after this one.
                attempt.answered_at = self._clock.monotonic()
                try:
                    answer = await self._store.open_attempt(
                        dispatch.chunk_id, dispatch.dispatch, attempt.delivery.num_delivered
                    )
                except CallFault as fault:
                    _log.warning("store_does_not_open", error=str(from_rpc_error(fault)))
                    self._reach.lost()
                    if not attempt.closed:
                        # Nothing is pulled here until the store answers; others may reach it.
                        self._endings.refuse(attempt, 0.0)
                    return
                self._reach.opened()
                await self._opened(attempt, answer)

    async def _opened(self, attempt: Attempt, answer: work_pb2.OpenAttemptResponse) -> None:
        outcome = answer.WhichOneof("outcome")
        if attempt.closed:
            # It ended here while the store opened it: nobody else will hand it back.
            if outcome == "opened":
                await self._hand_back(answer.opened.token)
        elif outcome == "opened":
            opened = answer.opened
            self._attempts.believe(attempt, opened)
            dispatch = attempt.dispatch
            _log.debug(
                "attempt_opened",
                batch=dispatch.batch_id,
                chunk=dispatch.chunk_id,
                attempt=opened.attempt,
                lines=attempt.left,
                alone=dispatch.alone,
            )
            if attempt.left:
                await self._read(attempt, [(part.first, part.count) for part in opened.lines])
            else:
                self._endings.finish(attempt)
        elif outcome == "busy":
            self._endings.refuse(attempt, answer.busy.retry_after_ms / 1000)
        else:
            _log.debug("dispatch_gone", chunk=attempt.dispatch.chunk_id, reason=answer.gone.reason)
            self._endings.forget(attempt)

    async def _hand_back(self, token: str) -> None:
        try:
            await self._store.hand_back([token])
        except CallFault as fault:
            _log.warning("hand_back_failed", error=str(from_rpc_error(fault)))

    async def _read(self, attempt: Attempt, ranges: list[Range]) -> None:
        """Read all lines, going on where a broken stream stopped."""
        backoff = Backoff(0.1, 2.0, self._chance)
        error = ""
        known = False
        for _ in range(READ_TRIES):
            # Of a store that is away, or has dealt with the attempt, there is nothing to tell it.
            error, known = "lines are missing", False
            try:
                async for lines in self._stream(attempt, ranges):
                    ranges = without_first(ranges, lines)
            except CallFault as fault:
                failure = from_rpc_error(fault)
                error, known = str(failure), isinstance(failure, _KNOWN)
                if not isinstance(failure, UnavailableError):
                    break
            except TimeoutError:
                error, known = "the stream is silent", True
            except ValueError as fault:
                error = str(fault)
            if attempt.closed or not ranges:
                return
            await asyncio.sleep(backoff.next_seconds())
        if attempt.closed:
            return
        if known:
            _log.warning("lines_not_read", chunk=attempt.dispatch.chunk_id, error=error)
            self._endings.drop([attempt], work_pb2.DROP_REASON_UNSPECIFIED)
        else:
            self._endings.give_up(attempt, f"its lines cannot be read ({error})")

    async def _stream(self, attempt: Attempt, ranges: list[Range]) -> AsyncIterator[int]:
        """Hand the lines of one stream on; yields how many there were in each frame.

        Raises:
            CallFault, TimeoutError, ValueError: it broke, fell silent, or makes no sense.
        """
        reader = LineReader()
        call = self._store.read_lines(attempt.token, ranges)
        frames = aiter(call)
        try:
            while not attempt.closed:
                async with asyncio.timeout(FRAME_WAIT_SECONDS):
                    frame = await anext(frames, None)
                if frame is None:
                    return
                lines = reader.feed(frame.records, frame.payload)
                self._runner.add(attempt, lines)
                yield len(lines)
        finally:
            # Leaving the loop alone would leave the call open.
            call.cancel()
