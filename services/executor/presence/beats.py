"""What the executor says of itself on the bus: each second, and at once when it runs low."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import prometheus_client

from protos.nightshift.v1 import dispatch_pb2
from services.executor.attempts import Attempts
from services.executor.chunks.endings import Tasks
from services.executor.lines.runner import Runner
from services.executor.presence.room import Room, expected_chunk_lines, room_of
from services.kit.messages.bus import Bus, BusFault
from services.kit.process.clock import Clock
from services.kit.process.log import get_logger
from services.kit.wire.ids import PoolId

_log = get_logger(__name__)

MERGE_SECONDS: Final = 0.02
"""Changes within this time are one message."""
REPEAT_SECONDS: Final = 3.0
"""The beat repeats which dispatches were pulled in this time: a message may have been lost."""
REPEAT_MOST: Final = 1_000
TROUBLE_LENGTH: Final = 500
"""Characters of an engine's own words that are passed on."""

_HELD = prometheus_client.Gauge("nightshift_executor_lines_held", "Lines pulled and not finished.")
_SEATS = prometheus_client.Gauge(
    "nightshift_executor_seats", "Requests that the engine can run at once."
)
_SPEED = prometheus_client.Gauge(
    "nightshift_executor_lines_per_second", "Lines finished per second of work."
)
_READY = prometheus_client.Gauge(
    "nightshift_executor_engine_ready", "1 when the engine takes work, else 0."
)

State = dispatch_pb2.EngineState


class Presence:
    """Knows the executor's room and tells the scheduler."""

    def __init__(
        self,
        *,
        executor_id: str,
        pool_id: PoolId,
        bus: Bus,
        attempts: Attempts,
        runner: Runner,
        tasks: Tasks,
        clock: Clock,
        on_ready: Callable[[bool], None],
    ) -> None:
        """Begin as starting, with no seats."""
        self._executor_id = executor_id
        self._pool_id = pool_id
        self._bus = bus
        self._attempts = attempts
        self._runner = runner
        self._tasks = tasks
        self._clock = clock
        self._on_ready = on_ready
        self._state: State.ValueType = State.ENGINE_STATE_STARTING
        self._reason = "the engine is starting"
        self._trouble = ""
        self.seats = 0
        self._said_held = 0
        self._said_at = 0.0
        self._saying = False
        self._recent: deque[tuple[float, str]] = deque(maxlen=REPEAT_MOST)

    @property
    def ready(self) -> bool:
        """Whether the engine takes work."""
        return self._state == State.ENGINE_STATE_READY

    @property
    def chunk_lines(self) -> int:
        """Lines that a chunk for this executor is expected to have."""
        return expected_chunk_lines(self.seats, self._runner.lines_per_second)

    def set_state(self, state: "State.ValueType", *, seats: int = 0, reason: str = "") -> None:
        """Change what is said of the engine, and say it at once.

        Why it died or did not start stays beside what is said later, until it runs.
        """
        self._state = state
        self.seats = seats
        self._reason = reason
        if state == State.ENGINE_STATE_DEAD:
            self._trouble = " ".join(reason.split())[:TROUBLE_LENGTH]
        elif self.ready:
            self._trouble = ""
        _SEATS.set(seats)
        _READY.set(self.ready)
        self._on_ready(self.ready)
        self._say_soon()

    def room(self) -> Room:
        """Return the marks of this moment."""
        held = self._attempts.held_lines
        return room_of(
            seats=max(1, self.seats),
            lines_per_second=self._runner.lines_per_second,
            mean_line_bytes=self._attempts.held_bytes / held if held else 0.0,
        )

    def changed(self) -> None:
        """Speak up if lines were pulled, or if it holds too few: in one message each 20 ms."""
        if self._saying or not self.ready:
            return
        if self._attempts.any_opened:
            self._say_soon()
            return
        held = self._attempts.held_lines
        room = self.room()
        if held < room.low:
            # Of room that was said only a good part more is news.
            step = max(1, (room.high - room.low) // 4)
            more = self._said_held - held
            if self._said_held >= room.low or more >= step or (more and not held):
                self._say_soon()

    def _say_soon(self) -> None:
        if self._saying:
            return
        self._saying = True
        wait = max(0.0, self._said_at + MERGE_SECONDS - self._clock.monotonic())
        asyncio.get_running_loop().call_later(wait, lambda: self._tasks.spawn(self._say()))

    async def _say(self) -> None:
        self._saying = False
        self._said_at = self._clock.monotonic()
        self._said_held = self._attempts.held_lines
        opened = self._attempts.take_opened()
        self._recent.extend((self._said_at, name) for name in opened)
        try:
            await self._bus.say_room(self._beat(opened))
        except BusFault as fault:
            _log.debug("room_not_said", error=str(fault))

    async def run_once(self) -> None:
        """Put the same under the executor's name, for those who missed the messages."""
        held = self._attempts.held_lines
        _HELD.set(held)
        _SPEED.set(self._runner.lines_per_second)
        if self._attempts.any_opened:
            await self._say()
        before = self._clock.monotonic() - REPEAT_SECONDS
        while self._recent and self._recent[0][0] < before:
            self._recent.popleft()
        try:
            await self._bus.put_beat(self._beat([name for _, name in self._recent]))
        except BusFault as fault:
            _log.debug("beat_not_put", error=str(fault))
            # A bucket without a leader is no silence of ours: this way needs none.
            await self._say()

    async def leave(self) -> None:
        """Remove the executor's name."""
        try:
            await self._bus.forget(self._executor_id)
        except BusFault as fault:
            _log.warning("name_not_removed", error=str(fault))

    def _beat(self, opened: list[str]) -> dispatch_pb2.ExecutorBeat:
        ready = self.ready
        room = self.room()
        return dispatch_pb2.ExecutorBeat(
            executor_id=self._executor_id,
            pool_id=self._pool_id,
            at_ms=int(self._clock.now() * 1000),
            seats=self.seats,
            held_lines=self._attempts.held_lines,
            low_water=room.low if ready else 0,
            high_water=room.high if ready else 0,
            lines_per_second=self._runner.lines_per_second,
            engine_state=self._state,
            opened=opened,
            reason=self._reason,
            trouble=self._trouble,
        )
