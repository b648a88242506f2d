"""A message is kept from others for as long as the store vouched for it, and no longer."""

from typing import Any, cast

import pytest

from protos.nightshift.v1 import dispatch_pb2, work_pb2
from services.executor.attempts import Attempts
from services.executor.chunks.endings import Endings, Tasks
from services.executor.chunks.keep_alive import Keeper
from services.executor.chunks.store_reach import Reach
from services.executor.store_client import Marks, StoreClient
from services.kit.messages.bus import ACK_WAIT_SECONDS, Delivery
from services.kit.process.clock import ManualClock

pytestmark = pytest.mark.unit

UNDER_WAY_SECONDS = 4.0


class SlowStore:
    """Answers each beat late, and drops nothing."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    async def beat(self, _marks: Marks) -> work_pb2.BeatResponse:
        self._clock.advance(UNDER_WAY_SECONDS)
        return work_pb2.BeatResponse()


class NotedDelivery:
    """Notes what is said of its message to the broker."""

    def __init__(self) -> None:
        self.dispatch = dispatch_pb2.Dispatch(chunk_id="chunk_a", line_count=1)
        self.said: list[str] = []

    async def keep(self) -> None:
        self.said.append("keep")

    async def give_back(self, _delay_seconds: float) -> None:
        self.said.append("give back")


async def test_a_beat_vouches_from_when_it_was_sent_and_not_from_when_it_was_answered() -> None:
    clock, attempts, tasks = ManualClock(), Attempts(), Tasks()
    store = cast(StoreClient, SlowStore(clock))
    endings = Endings(attempts=attempts, store=store, tasks=tasks, clock=clock)
    keeper = Keeper(
        store=store,
        attempts=attempts,
        endings=endings,
        reach=Reach(store, lambda: 0.0),
        clock=clock,
    )
    delivery: Any = NotedDelivery()
    attempt = attempts.add(cast(Delivery, delivery), clock.monotonic())
    attempt.token = "attempt_a"
    clock.advance(1.0)

    asked_at = clock.monotonic()
    assert await keeper.beat_once() == 1
    assert attempt.answered_at == asked_at
    clock.advance(ACK_WAIT_SECONDS - UNDER_WAY_SECONDS)
    assert await keeper.keep_once() == 1
    assert delivery.said == ["keep"]

    clock.advance(0.5)
    assert await keeper.keep_once() == 0
    await tasks.settle(10.0)
    assert attempt.released
    assert delivery.said == ["keep", "give back"]
