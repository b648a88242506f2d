"""Wakes streams of events: one look at SQL for all that wait, after commits here and each second.

What another store commits is found by the tick alone. Who is woken reads when it has its turn, of
which there are so many a second for all: watchers of many batches, or many of one, cost no more.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import prometheus_client

from services.store.db.database import Database
from services.store.domain.turns import Turns
from services.store.events import events_repo

LEAST_SECONDS: Final = 0.1
"""Commits within this time are one event: a reader gains nothing from a thousand a second."""
PAGES_PER_SECOND: Final = 100
"""Pages that are read for streams which wait, and sent; projects in turn."""
_BURST: Final = 20
_AT_ONCE: Final = 500

_WAITING = prometheus_client.Gauge(
    "nightshift_store_event_streams", "Streams of events that wait for something to happen."
)


class EventHub:
    """Who waits for which batch."""

    def __init__(self, db: Database) -> None:
        """Look at batches of `db`; nobody waits yet."""
        self._db = db
        self._waiting: dict[str, dict[asyncio.Event, int]] = {}
        self._turns: Turns[asyncio.Future[None]] = Turns(per_second=PAGES_PER_SECOND, burst=_BURST)
        self._next_turn: asyncio.TimerHandle | None = None
        self.looked = 0.0
        """The loop's time at which the last look began."""
        self.closed = False

    @contextlib.contextmanager
    def watching(self, batch_id: str, version: int) -> Iterator[asyncio.Event]:
        """Yield an event that is set once the batch has another version than this one."""
        changed = asyncio.Event()
        self._waiting.setdefault(batch_id, {})[changed] = version
        _WAITING.inc()
        try:
            yield changed
        finally:
            _WAITING.dec()
            waiting = self._waiting[batch_id]
            del waiting[changed]
            if not waiting:
                del self._waiting[batch_id]

    def close(self) -> None:
        """Send everybody away: the store stops."""
        self.closed = True
        for waiting in self._waiting.values():
            for changed in waiting:
                changed.set()
        self._give(self._turns.all())

    async def turn(self, project_id: str) -> None:
        """Wait until it is this project's turn to read a page; at once where few want to."""
        if self.closed:
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.ask(project_id, mine)
        try:
            self._give_turns()
            await mine
        finally:
            self._turns.leave(project_id, mine)

    def _give_turns(self) -> None:
        loop = asyncio.get_running_loop()
        self._give(self._turns.given(loop.time()))
        if self._next_turn is not None:
            self._next_turn.cancel()
        seconds = self._turns.next_in()
        self._next_turn = None if seconds is None else loop.call_later(seconds, self._give_turns)

    def _give(self, waiting: Iterable["asyncio.Future[None]"]) -> None:
        for one in waiting:
            if not one.done():
                one.set_result(None)

    async def run_once(self) -> int:
        """Wake who waits for what has changed; return how many."""
        if not self._waiting:
            return 0
        loop = asyncio.get_running_loop()
        early = LEAST_SECONDS - (loop.time() - self.looked)
        if early > 0:
            await asyncio.sleep(early)
        self.looked = loop.time()
        woken = 0
        batch_ids = iter(list(self._waiting))
        while some := list(islice(batch_ids, _AT_ONCE)):
            found = await self._db.read(
                lambda connection, some=some: events_repo.versions(connection, some)  # type: ignore[misc]  # bound now
            )
            for batch_id, version in found.items():
                for changed, known in self._waiting.get(batch_id, {}).items():
                    if version != known:
                        changed.set()
                        woken += 1
        return woken
