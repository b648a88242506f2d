"""How attempts end, each exactly once: done, dropped, handed back, or dead with the engine.

The order is always the same: no line of it starts or finishes any more (`closed`), what is
finished becomes durable, the store closes the attempt, and only then the broker is answered.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from protos.nightshift.v1 import work_pb2
from services.executor.attempts import Attempt, Attempts
from services.executor.lines.engine_death import Death
from services.executor.lines.reporter import Reporter
from services.executor.lines.runner import Runner
from services.executor.store_client import Marks, StoreClient, ranges_of
from services.kit.calls.rpc import CallFault
from services.kit.messages.bus import ACK_WAIT_SECONDS, BusFault
from services.kit.process.clock import Clock
from services.kit.process.log import get_logger
from services.kit.wire.errors import from_rpc_error

_log = get_logger(__name__)

Reason = work_pb2.DropReason

FLUSH_SECONDS: Final = 1.5
"""Finished results get this long before the store is told: it seals 2 s after a cancel."""
LAST_FLUSH_SECONDS: Final = 5.0
"""The same where nobody waits: after a death."""
HAND_BACK_SECONDS: Final = 3.0
"""Everything that is done to hand attempts back takes no longer; half of it is for the results."""
REPORT_SECONDS: Final = 12.0
"""A death is reported within this time or not at all: the leases have run out by then."""


class Tasks:
    """Background steps that nobody awaits; kept from being collected, their failures logged."""

    def __init__(self) -> None:
        """Start with none."""
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, step: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a step in the background."""
        task = asyncio.get_running_loop().create_task(step)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("step_failed", exc_info=error)

    async def settle(self, within_seconds: float) -> None:
        """Wait for the steps that run, then cancel the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_seconds)
        for task in list(self._tasks):
            task.cancel()


class Endings:
    """Ends attempts."""

    def __init__(
        self,
        *,
        attempts: Attempts,
        store: StoreClient,
        tasks: Tasks,
        clock: Clock,
    ) -> None:
        """Make it; `serve` adds what depends on it."""
        self._attempts = attempts
        self._store = store
        self._tasks = tasks
        self._clock = clock
        self._runner: Runner | None = None
        self._reporter: Reporter | None = None

    def serve(self, runner: Runner, reporter: Reporter) -> None:
        """Learn what aborts lines and what sends results; they call back in turn."""
        self._runner = runner
        self._reporter = reporter

    def finish(self, attempt: Attempt) -> None:
        """All results so far are durable: if no line is left, the message is done with."""
        if attempt.left or attempt.closed:
            return
        attempt.closed = True
        self._leave([attempt])
        self._tasks.spawn(self._ack(attempt))

    def refuse(self, attempt: Attempt, delay_seconds: float) -> None:
        """Give back a delivery that was not opened here."""
        attempt.closed = True
        self._leave([attempt])
        self._tasks.spawn(self._give_back(attempt, delay_seconds))

    def forget(self, attempt: Attempt) -> None:
        """Acknowledge a delivery with nothing left to run."""
        attempt.closed = True
        self._leave([attempt])
        self._tasks.spawn(self._ack(attempt))

    def drop(self, attempts: Iterable[Attempt], reason: "Reason.ValueType") -> None:
        """Stop these at once; what is finished is kept. Repeatable."""
        dropped = self._close(attempts)
        if dropped:
            self._tasks.spawn(self._drop(dropped, reason))

    def give_up(self, attempt: Attempt, trouble: str) -> None:
        """Hand an attempt back that cannot be run here, and tell the store why."""
        dropped = self._close([attempt])
        if dropped:
            _log.error("chunk_given_up", chunk=attempt.dispatch.chunk_id, error=trouble)
            self._tasks.spawn(self._drop(dropped, Reason.DROP_REASON_UNSPECIFIED, trouble))

    def let_go(self, attempt: Attempt) -> None:
        """Hold a delivery no longer that the broker is about to give to somebody else."""
        attempt.closed = True
        self._leave([attempt])

    def release(self, attempts: Iterable[Attempt]) -> None:
        """Leave the messages of these to the broker at once; their lines run on.

        The store was not heard of for so long that others may have to run them. Should this be
        wrong, what they finish here still counts.
        """
        for attempt in attempts:
            _log.warning("message_released", chunk=attempt.dispatch.chunk_id)
            if self._is_ours(attempt):
                self._tasks.spawn(self._nak(attempt, 0.0))
            attempt.released = True

    def bury(self, death: Death, start_seconds: float) -> None:
        """Give all attempts up after the engine's death, and name the lines that were in it.

        `start_seconds`: how long that engine had taken to start.
        """
        self._tasks.spawn(self._bury(self._close(self._attempts), death, start_seconds))

    async def _bury(self, attempts: list[Attempt], death: Death, start_seconds: float) -> None:
        await self._abort_and_flush(attempts, LAST_FLUSH_SECONDS)
        suspects: Marks = [
            (attempt.token, ranges_of(sorted(lines)))
            for attempt, lines in death.casualties.items()
            if attempt.token
        ]
        dead = {token for token, _ in suspects}
        others = [one.token for one in attempts if one.token and one.token not in dead]
        told = await self._try_until_told(
            lambda: self._store.report_death(
                suspects, death.reason, complete=death.complete, start_seconds=start_seconds
            ),
            bool(suspects),
        ) and await self._try_until_told(lambda: self._store.hand_back(others), bool(others))
        self._leave(attempts)
        for attempt in attempts:
            # The store hands such chunks out under a new number; untold, the broker must.
            known = told and attempt.token
            step = self._ack(attempt) if known else self._give_back(attempt, 1.0)
            self._tasks.spawn(step)

    async def hand_back(self, attempts: Iterable[Attempt]) -> None:
        """Give attempts back in order, for other executors to go on at once.

        Neither a store nor an engine that does not answer holds this up for longer than
        `HAND_BACK_SECONDS`: the broker hands the messages on in any case.
        """
        attempts = self._close(attempts)
        if not attempts:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_BACK_SECONDS):
                await self._abort_and_flush(attempts, HAND_BACK_SECONDS / 2)
                await self._hand_back(attempts)
        self._leave(attempts)
        await asyncio.gather(*(self._give_back(attempt, 0.0) for attempt in attempts))

    async def _drop(
        self, attempts: list[Attempt], reason: "Reason.ValueType", trouble: str = ""
    ) -> None:
        names = [attempt.dispatch.chunk_id for attempt in attempts]
        label = Reason.Name(reason).removeprefix("DROP_REASON_").lower()
        # A batch that is sealed because all is done is no news.
        log = _log.debug if reason == Reason.DROP_REASON_DONE else _log.info
        log("attempts_dropped", chunks=names[:8], count=len(names), reason=label)
        await self._abort_and_flush(attempts, FLUSH_SECONDS)
        if reason == Reason.DROP_REASON_SUPERSEDED:
            # Somebody else holds the chunk: a late ack would delete the message under them.
            self._leave(attempts)
            return
        if reason != Reason.DROP_REASON_DONE:
            await self._hand_back(attempts, trouble)
        self._leave(attempts)
        await asyncio.gather(*(self._ack(attempt) for attempt in attempts))

    def _close(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        closed = [attempt for attempt in attempts if not attempt.closed]
        for attempt in closed:
            attempt.closed = True
        return closed

    async def _abort_and_flush(self, attempts: list[Attempt], within_seconds: float) -> None:
        assert self._runner is not None
        assert self._reporter is not None
        # Results do not wait for an engine that is slow to let go; it is asked all the same.
        letting_go = self._tasks.spawn(self._runner.abort(attempts))
        began = self._clock.monotonic()
        await self._reporter.flush(attempts, within_seconds)
        left = within_seconds - (self._clock.monotonic() - began)
        await asyncio.wait([letting_go], timeout=max(0.0, left))

    def _leave(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            self._attempts.remove(attempt)
            attempt.span.end()

    async def _hand_back(self, attempts: list[Attempt], trouble: str = "") -> None:
        tokens = [attempt.token for attempt in attempts if attempt.token]
        if not tokens:
            return
        try:
            await self._store.hand_back(tokens, trouble)
        except CallFault as fault:
            _log.warning("hand_back_failed", error=str(from_rpc_error(fault)))

    async def _try_until_told(
        self, tell: Callable[[], Coroutine[Any, Any, None]], needed: bool
    ) -> bool:
        """Repeat a call to the store for `REPORT_SECONDS`; true when it was answered."""
        if not needed:
            return True
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                while True:
                    try:
                        await tell()
                    except CallFault as fault:
                        _log.warning("death_not_reported", error=str(from_rpc_error(fault)))
                        await asyncio.sleep(0.5)
                    else:
                        return True
        except TimeoutError:
            return False

    async def _ack(self, attempt: Attempt) -> None:
        if attempt.released:
            return
        try:
            await attempt.delivery.ack()
        except BusFault as fault:
            # It comes again, and the store answers that nothing is left.
            _log.warning("ack_failed", chunk=attempt.dispatch.chunk_id, error=str(fault))

    async def _give_back(self, attempt: Attempt, delay_seconds: float) -> None:
        if self._is_ours(attempt):
            await self._nak(attempt, delay_seconds)

    def _is_ours(self, attempt: Attempt) -> bool:
        """Whether the broker waits for our word: later, it would take from somebody else."""
        since = self._clock.monotonic() - attempt.kept_at
        return not attempt.released and since < ACK_WAIT_SECONDS

    async def _nak(self, attempt: Attempt, delay_seconds: float) -> None:
        try:
            await attempt.delivery.give_back(delay_seconds)
        except BusFault as fault:
            _log.warning("give_back_failed", chunk=attempt.dispatch.chunk_id, error=str(fault))
