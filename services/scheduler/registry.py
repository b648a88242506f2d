"""Executors alive, from their own words; one that falls silent is forgotten."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from protos.nightshift.v1 import dispatch_pb2
from protos.nightshift.v1.dispatch_pb2 import ExecutorBeat
from services.kit.process.clock import Clock
from services.kit.process.log import get_logger
from services.kit.wire.ids import PoolId
from services.scheduler.domain.capacity import ExecutorWord

_log = get_logger(__name__)

SILENT_SECONDS: Final = 5.0
"""An executor that said nothing new for this long is dead."""
# The bucket forgets sooner: what is swept does not come back from it as somebody new.
_FORGET_SECONDS: Final = 120.0


@dataclass(slots=True)
class _Known:
    word: ExecutorWord
    # By this scheduler's clock, since the executors' own may differ.
    heard: float
    # `at_ms` of what was last read from the bucket; 0 when nothing was.
    read_ms: int


class Registry:
    """The last word of each executor."""

    def __init__(self, clock: Clock) -> None:
        """Know nobody yet."""
        self._clock = clock
        self._known: dict[str, _Known] = {}

    def hear(self, beat: ExecutorBeat) -> None:
        """Take what an executor said just now."""
        known = self._known.get(beat.executor_id)
        if known is not None and beat.at_ms < known.word.at_ms and self._alive(known):
            return
        self._take(beat, self._clock.monotonic(), known.read_ms if known else 0)

    def read(self, beats: Iterable[ExecutorBeat]) -> None:
        """Take what stands in the bucket: it may be old, and the last word of a dead executor."""
        for beat in beats:
            known = self._known.get(beat.executor_id)
            now = self._clock.monotonic()
            if known is None:
                # One whose clock is off is believed at its next beat.
                old = abs(self._clock.now() - beat.at_ms / 1000) > SILENT_SECONDS
                self._take(beat, now - SILENT_SECONDS if old else now, beat.at_ms)
            elif beat.at_ms != known.read_ms:
                known.read_ms = beat.at_ms
                if beat.at_ms >= known.word.at_ms or not self._alive(known):
                    self._take(beat, now, beat.at_ms)

    def sweep(self) -> None:
        """Forget who has been silent for long."""
        now = self._clock.monotonic()
        for name, known in list(self._known.items()):
            if now - known.heard >= _FORGET_SECONDS:
                del self._known[name]

    def alive(self) -> dict[PoolId, list[ExecutorWord]]:
        """Return the last words of those alive, by pool."""
        found: dict[PoolId, list[ExecutorWord]] = {}
        for known in self._known.values():
            if self._alive(known):
                found.setdefault(known.word.pool_id, []).append(known.word)
        return found

    def _alive(self, known: _Known) -> bool:
        return self._clock.monotonic() - known.heard < SILENT_SECONDS

    def _take(self, beat: ExecutorBeat, heard: float, read_ms: int) -> None:
        if beat.executor_id not in self._known:
            _log.info("executor_seen", executor=beat.executor_id, pool=beat.pool_id)
        self._known[beat.executor_id] = _Known(_word_of(beat), heard, read_ms)


def _word_of(beat: ExecutorBeat) -> ExecutorWord:
    return ExecutorWord(
        executor_id=beat.executor_id,
        pool_id=PoolId(beat.pool_id),
        at_ms=beat.at_ms,
        seats=beat.seats,
        held_lines=beat.held_lines,
        low_water=beat.low_water,
        high_water=beat.high_water,
        lines_per_second=beat.lines_per_second,
        ready=beat.engine_state == dispatch_pb2.ENGINE_STATE_READY,
        trouble=beat.trouble,
    )
