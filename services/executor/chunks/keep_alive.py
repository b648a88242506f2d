"""Keeps attempts alive: a beat to the store each second, a word to the broker each three.

The design asks for a thread of its own that stops when the engine does. This runs in the
engine's own loop instead, which gives both halves of that: nothing here or in an engine blocks
the loop for longer than a slice of lines (vLLM computes in processes of its own), so beats are on
time; and when the loop hangs, so does whatever is to be kept alive, and the beats stop with it,
without a second thread having to find out.
"""

from typing import Final

from protos.nightshift.v1 import work_pb2
from services.executor.attempts import Attempt, Attempts
from services.executor.chunks.endings import Endings
from services.executor.chunks.store_reach import Reach
from services.executor.store_client import StoreClient, ranges_of
from services.kit.calls.rpc import CallFault
from services.kit.messages.bus import ACK_WAIT_SECONDS, IN_PROGRESS_SECONDS, BusFault
from services.kit.process.clock import Clock
from services.kit.process.log import get_logger
from services.kit.wire.errors import from_rpc_error

_log = get_logger(__name__)

BEAT_SECONDS: Final = 1.0


class Keeper:
    """Beats for all attempts together."""

    def __init__(
        self,
        *,
        store: StoreClient,
        attempts: Attempts,
        endings: Endings,
        reach: Reach,
        clock: Clock,
    ) -> None:
        """Make a keeper; two loops step it."""
        self._store = store
        self._reach = reach
        self._attempts = attempts
        self._endings = endings
        self._clock = clock

    async def beat_once(self) -> int:
        """Beat to the store for all open attempts and drop what it names; return their number."""
        asked_at = self._clock.monotonic()
        attempts = {one.token: one for one in self._attempts.open_ones()}
        if not attempts:
            return 0
        try:
            answer = await self._store.beat(
                [(token, ranges_of(one.started_lines())) for token, one in attempts.items()]
            )
        except CallFault as fault:
            _log.warning("beat_failed", error=str(from_rpc_error(fault)))
            self._reach.lost()
            return 0
        self._reach.answered()
        drops: dict[work_pb2.DropReason.ValueType, list[Attempt]] = {}
        for drop in answer.drops:
            dropped = attempts.pop(drop.token, None)
            if dropped is not None:
                drops.setdefault(drop.reason, []).append(dropped)
        for attempt in attempts.values():
            # The time of asking: the answer may have been long under way.
            attempt.answered_at = asked_at
        for reason, named in drops.items():
            self._endings.drop(named, reason)
        # Lines may have waited for that word.
        self._attempts.changed()
        return len(attempts)

    async def keep_once(self) -> int:
        """Put redelivery off for attempts that the store knows to be alive; return their number.

        Of the others it holds no message longer than the broker would wait for a dead executor:
        the store may be in reach of somebody else, and may have given their chunks away.
        """
        now = self._clock.monotonic()
        held = [one for one in self._attempts.open_ones() if not one.released]
        self._endings.release(one for one in held if now - one.answered_at > ACK_WAIT_SECONDS)
        due = [one for one in held if not one.released and now - one.kept_at >= IN_PROGRESS_SECONDS]
        for attempt in due:
            try:
                await attempt.delivery.keep()
            except BusFault as fault:
                _log.warning("keep_failed", error=str(fault))
                break
            attempt.kept_at = now
        return len(due)
