"""Dispatch: slide the window, decide, cut in the store, publish; woken by events and by room."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import prometheus_client

from protos.nightshift.v1 import dispatch_pb2
from services.kit.messages.bus import BusFault
from services.kit.process.clock import Clock
from services.kit.process.log import get_logger
from services.kit.wire.errors import NightshiftError, StaleTermError
from services.kit.wire.ids import BatchId, PoolId
from services.scheduler.domain.capacity import Capacity
from services.scheduler.domain.chunker import Cut
from services.scheduler.domain.decision import State, decide
from services.scheduler.domain.policies.base import Policy
from services.scheduler.domain.window import Key, Window
from services.scheduler.leader import Leader
from services.scheduler.queues import Queues
from services.scheduler.registry import Registry
from services.scheduler.work_client import WorkClient

_log = get_logger(__name__)

# A batch of which the store cut nothing is asked for again after this time, not at once.
_BARREN_SECONDS: Final = 1.0

_LEAVES: Final = frozenset(
    {
        dispatch_pb2.EVENT_KIND_BATCH_CANCELLING,
        dispatch_pb2.EVENT_KIND_BATCH_EXPIRING,
        dispatch_pb2.EVENT_KIND_BATCH_SEALED,
        dispatch_pb2.EVENT_KIND_BATCH_ENDED,
    }
)

_WINDOW = prometheus_client.Gauge(
    "nightshift_scheduler_window_batches", "Batches in the window with lines left to cut."
)


class Dispatcher:
    """Holds the window, and is the only one that cuts from it."""

    def __init__(
        self,
        *,
        client: WorkClient,
        leader: Leader,
        registry: Registry,
        queues: Queues,
        policy: Policy,
        clock: Clock,
        tick_seconds: float,
    ) -> None:
        """Hold nothing until this scheduler leads.

        Args:
            client: calls the store.
            leader: says whether, and in which term.
            registry: the executors alive.
            queues: where chunks are published.
            policy: order of the batches of a pool.
            clock: measures ticks, and carries the store's clock on.
            tick_seconds: how often the window slides without an event.
        """
        self._client = client
        self._leader = leader
        self._registry = registry
        self._queues = queues
        self._policy = policy
        self._clock = clock
        self._tick_seconds = tick_seconds
        self._term: int | None = None
        self._window = Window({})
        self._pool_ids: tuple[PoolId, ...] = ()
        # Store's clock less this process's, in milliseconds.
        self._ahead_ms = 0.0
        self._slid_at = 0.0
        # Slide before the next cut; slide even though no pool has room.
        self._stale = True
        self._overdue = True
        self._barren: dict[Key, float] = {}

    def note(self, event: dispatch_pb2.Event) -> None:
        """Let an event slide the window at the next turn, where it concerns it."""
        if event.kind in _LEAVES:
            # Of the many batches that end, few have lines left here.
            if BatchId(event.batch_id) in self._window:
                self._window = self._window.without([BatchId(event.batch_id)])
                self._stale = True
        elif event.kind == dispatch_pb2.EVENT_KIND_BATCH_READY:
            self._stale = True
            self._overdue |= PoolId(event.pool_id) not in self._pool_ids
        elif event.kind == dispatch_pb2.EVENT_KIND_EXECUTOR:
            # It may serve a new pool, whose queue it waits for.
            self._overdue = True

    async def run_once(self) -> int:
        """Publish all that there is room for; return the number of chunks published."""
        term = self._leader.term
        if term is None:
            return 0
        if term != self._term:
            self._begin(term)
        published = 0
        try:
            while self._leader.leads(term):
                await self._queues.ensure(self._pool_ids)
                capacities = self._queues.capacities(self._registry.alive())
                if self._must_slide(capacities):
                    await self._slide(term)
                    continue
                state = State(self._window, capacities, self._policy)
                cuts = decide(state, int(self._clock.monotonic() * 1000 + self._ahead_ms))
                if not cuts:
                    break
                published += await self._cut(term, cuts)
        except StaleTermError:
            self._leader.lost(term)
        except NightshiftError as error:
            self._stale = self._overdue = True
            _log.warning("dispatch_waits_for_store", error=error.message)
        except BusFault as fault:
            _log.warning("dispatch_waits_for_bus", error=str(fault) or type(fault).__name__)
        return published

    def _begin(self, term: int) -> None:
        self._term = term
        self._window = Window({})
        self._pool_ids = ()
        self._barren.clear()
        self._stale = self._overdue = True
        self._queues.clear()

    def _must_slide(self, capacities: Mapping[PoolId, Capacity]) -> bool:
        now = self._clock.monotonic()
        if self._overdue or now - self._slid_at >= self._tick_seconds:
            return True
        if self._barren and min(self._barren.values()) <= now - _BARREN_SECONDS:
            return True
        # Without room there is nothing to put in order.
        return any(
            capacity.room and (self._stale or (self._window.lacks(pool_id) and not self._barren))
            for pool_id, capacity in capacities.items()
        )

    async def _slide(self, term: int) -> None:
        # Taken back before the store is asked, so that an event meanwhile is not lost.
        self._stale = self._overdue = False
        answer = await self._client.window(term)
        now = self._clock.monotonic()
        self._slid_at = now
        self._ahead_ms = answer.now_ms - now * 1000
        self._pool_ids = answer.pool_ids
        self._barren = {
            key: since for key, since in self._barren.items() if now - since < _BARREN_SECONDS
        }
        self._window = answer.window.without_keys(self._barren)
        _WINDOW.set(len(self._window))

    async def _cut(self, term: int, cuts: Sequence[Cut]) -> int:
        dispatches = await self._client.cut(term, cuts)
        lines: Counter[Key] = Counter()
        for dispatch in dispatches:
            key = PoolId(dispatch.pool_id), BatchId(dispatch.batch_id)
            lines[key] += dispatch.line_count
        self._window = self._window.advanced(lines)
        barren = {(cut.pool_id, cut.batch_id) for cut in cuts} - lines.keys()
        if barren:
            # The store knows better than this window what is open.
            self._window = self._window.without_keys(barren)
            self._barren.update(dict.fromkeys(barren, self._clock.monotonic()))
        _WINDOW.set(len(self._window))
        return await self._queues.publish(term, dispatches)
