"""The pools' queues on the bus: made before use, measured each second, published to."""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import prometheus_client

from protos.nightshift.v1.dispatch_pb2 import Dispatch, ExecutorBeat
from services.kit.messages.bus import Bus, BusFault, BusGone, BusRefusal
from services.kit.process import telemetry
from services.kit.process.clock import Clock
from services.kit.process.log import get_logger
from services.kit.process.tasks import end
from services.kit.wire.ids import ChunkId, PoolId
from services.scheduler.domain.capacity import Capacity, ExecutorWord, capacity_of
from services.scheduler.domain.chunker import full_chunk_lines
from services.scheduler.domain.unopened import Unopened
from services.scheduler.leader import Leader

_log = get_logger(__name__)

PUBLISH_SECONDS: Final = 60.0
"""How long a dispatch is tried; after that reconciling finds it by its age."""
# A stream whose leader died has none for 4 to 9 s, and refuses at once; whoever waits for chunks
# is to wait no longer than that.
_FIRST_DELAY_SECONDS: Final = 0.05
_MOST_DELAY_SECONDS: Final = 0.25
# Executors' words wake the dispatcher many times a second; a broker that cannot make a queue is
# asked again after a growing while instead.
_FIRST_ENSURE_SECONDS: Final = 0.05
_MOST_ENSURE_SECONDS: Final = 2.0

_PUBLISHED = prometheus_client.Counter(
    "nightshift_scheduler_chunks_published_total", "Dispatches that the broker took.", ["pool"]
)
_ROOM = prometheus_client.Gauge(
    "nightshift_scheduler_room_lines", "Lines that a pool can be sent now.", ["pool"]
)
_UNOPENED = prometheus_client.Gauge(
    "nightshift_scheduler_unopened_lines", "Lines published and opened by nobody yet.", ["pool"]
)


class Queues:
    """What this leader knows of the broker; empty at the start of each term."""

    def __init__(self, bus: Bus, leader: Leader, clock: Clock) -> None:
        """Know of no queue yet."""
        self._bus = bus
        self._leader = leader
        self._clock = clock
        self._streams_stand = False
        self._ready: set[PoolId] = set()
        self._ensure_delay = _FIRST_ENSURE_SECONDS
        self._ensure_at = 0.0
        self._ensuring = asyncio.Lock()
        self._unopened = Unopened()
        # The dispatch of each chunk that is being published, so that a higher one ends the wait.
        self._publishing: dict[ChunkId, int] = {}

    @property
    def ready(self) -> frozenset[PoolId]:
        """Return the pools that can be published to."""
        return frozenset(self._ready)

    def clear(self) -> None:
        """Begin a term: what a former one knew is too old."""
        self._streams_stand = False
        self._ensure_at = 0.0
        self._ready.clear()
        self._unopened.clear()

    async def ensure(self, pool_ids: Iterable[PoolId]) -> None:
        """Make what is missing for these pools, and count what waits there.

        After a failure it does nothing for a growing while, in which such pools are not ready. A
        queue that the broker refuses to make keeps no other from being made.

        Raises:
            BusFault: the broker does not answer, or lost its streams; pools made so far are ready.
        """
        wanted = list(pool_ids)
        if self._ready.issuperset(wanted):
            return
        async with self._ensuring:
            missing = [pool_id for pool_id in wanted if pool_id not in self._ready]
            if missing and self._clock.monotonic() >= self._ensure_at:
                await self._make(missing)

    async def _make(self, missing: Iterable[PoolId]) -> None:
        try:
            if not self._streams_stand:
                await self._bus.ensure_streams()
                self._streams_stand = True
            made = [await self._make_one(pool_id) for pool_id in missing]
        except BusFault:
            self._put_off()
            raise
        if all(made):
            self._ensure_delay = _FIRST_ENSURE_SECONDS
        else:
            self._put_off()

    async def _make_one(self, pool_id: PoolId) -> bool:
        """Make a pool's queue; tell whether the broker did."""
        asked = self._clock.monotonic()
        try:
            waiting = await self._bus.ensure_consumer(pool_id)
        except BusGone:
            # So will all others be.
            raise
        except BusRefusal as fault:
            _log.warning("queue_cannot_be_made", pool=pool_id, error=_named(fault))
            return False
        self._unopened.correct(pool_id, waiting, asked)
        self._ready.add(pool_id)
        return True

    def _put_off(self) -> None:
        self._streams_stand = False
        self._ensure_at = self._clock.monotonic() + self._ensure_delay
        self._ensure_delay = min(2 * self._ensure_delay, _MOST_ENSURE_SECONDS)

    async def measure(self) -> dict[PoolId, int]:
        """Return what waits in each ready pool's queue, and correct the counts by it.

        A pool whose consumer does not answer is left out; one that is gone is made again, or
        ready no more.
        """
        gone: set[PoolId] = set()

        async def ask(pool_id: PoolId) -> int | None:
            try:
                return await self._bus.pending(pool_id)
            except BusFault as fault:
                _log.warning("queue_not_measured", pool=pool_id, error=_named(fault))
                if isinstance(fault, BusGone):
                    gone.add(pool_id)
                return None

        asked = self._clock.monotonic()
        pools = sorted(self._ready)
        pending: dict[PoolId, int] = {}
        for pool_id, number in zip(pools, await asyncio.gather(*map(ask, pools)), strict=True):
            if number is not None:
                pending[pool_id] = number
                self._unopened.correct(pool_id, number, asked)
        self._ready -= gone
        for pool_id in gone:
            await self._mend(pool_id)
        return pending

    async def _mend(self, pool_id: PoolId) -> None:
        """Make a queue again that failed, where it can be; who publishes to it may be waiting.

        It stays ready: what has no leader for the moment is there, and takes what is cut meanwhile
        as soon as it has one.
        """
        self._streams_stand = False
        async with self._ensuring:
            if self._clock.monotonic() >= self._ensure_at:
                with contextlib.suppress(*BusFault):
                    await self._make((pool_id,))

    def note_opened(self, beat: ExecutorBeat) -> None:
        """Take off the count what an executor says it opened or dropped."""
        for text in beat.opened:
            chunk_id, _, number = text.rpartition(":")
            if number.isdecimal():
                self._unopened.opened(PoolId(beat.pool_id), (ChunkId(chunk_id), int(number)))

    def capacities(self, words: dict[PoolId, list[ExecutorWord]]) -> dict[PoolId, Capacity]:
        """Return what each ready pool can take, from the last words of its live executors."""
        found: dict[PoolId, Capacity] = {}
        if not self._bus.connected:
            # What is cut now could not be published.
            return found
        for pool_id in self._ready:
            capacity = capacity_of(words.get(pool_id, ()))
            unopened = self._unopened.lines(pool_id, full_chunk_lines(capacity))
            found[pool_id] = replace(capacity, unopened_lines=unopened)
            _ROOM.labels(pool_id).set(found[pool_id].room)
            _UNOPENED.labels(pool_id).set(unopened)
        return found

    async def publish(self, term: int, dispatches: Sequence[Dispatch]) -> int:
        """Publish dispatches all at once, in order; return how many the broker took.

        One that gets no answer is published again under the same id, while this scheduler leads in
        `term`, no higher dispatch of the chunk is published, and for `PUBLISH_SECONDS` at most.
        """
        now = self._clock.monotonic()
        for dispatch in dispatches:
            chunk_id = ChunkId(dispatch.chunk_id)
            self._publishing[chunk_id] = dispatch.dispatch
            self._unopened.opened(PoolId(dispatch.pool_id), (chunk_id, dispatch.dispatch - 1))
            # Before it is published: its opening may be heard before the broker's answer.
            self._unopened.add(
                PoolId(dispatch.pool_id),
                (chunk_id, dispatch.dispatch),
                lines=dispatch.line_count,
                now=now,
            )
        taken = await asyncio.gather(*(self._publish(term, each) for each in dispatches))
        return sum(taken)

    async def _publish(self, term: int, dispatch: Dispatch) -> bool:
        chunk_id = ChunkId(dispatch.chunk_id)
        give_up = self._clock.monotonic() + PUBLISH_SECONDS
        delay = _FIRST_DELAY_SECONDS
        told = ""
        mending: asyncio.Task[None] | None = None
        try:
            while self._may_publish(term, dispatch) and self._clock.monotonic() < give_up:
                try:
                    await self._publish_once(dispatch)
                except BusFault as fault:
                    if _named(fault) != told:
                        told = _named(fault)
                        _log.warning(
                            "publish_unanswered",
                            chunk=chunk_id,
                            dispatch=dispatch.dispatch,
                            error=told,
                        )
                    # Beside the tries: a broker that is asked for what has no leader is silent for
                    # seconds, in which it may have got one.
                    if mending is None or mending.done():
                        mending = asyncio.create_task(self._mend(PoolId(dispatch.pool_id)))
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, _MOST_DELAY_SECONDS)
                else:
                    _PUBLISHED.labels(dispatch.pool_id).inc()
                    return True
            return False
        finally:
            if mending is not None:
                await end(mending)
            if self._publishing.get(chunk_id) == dispatch.dispatch:
                del self._publishing[chunk_id]

    def _may_publish(self, term: int, dispatch: Dispatch) -> bool:
        latest = self._publishing.get(ChunkId(dispatch.chunk_id))
        return self._leader.leads(term) and latest == dispatch.dispatch

    async def _publish_once(self, dispatch: Dispatch) -> None:
        with telemetry.span_of("publish", dispatch.traceparent, chunk=dispatch.chunk_id):
            await self._bus.publish_dispatch(dispatch)


def _named(fault: BaseException) -> str:
    return str(fault) or type(fault).__name__
