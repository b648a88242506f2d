"""Keeps batches running while faults are made, and watches each: nothing it sees may go back."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from typing import Final

import openai
from openai import AsyncOpenAI
from openai.types import Batch

from tests.chaos.ledger import RETRIED, Client, Entry, Ledger, Violation
from tests.chaos.verify import check_batch
from tests.chaos.workload import OTHERS, Order, deadly, poison, steady
from tests.kit.batches import ENDED, check_step

POLL_SECONDS: Final = 0.25
FRESH_SECONDS: Final = 2.0
"""How old an answer may be that says that lines are done and others are not."""
BESIDE: Final = 3
"""Batches that run beside the steady ones."""
IN_PARTS: Final = 0.2
"""Share of inputs that go up in parts."""
DELETED: Final = 0.15
"""Share of output files that are looked at and deleted while faults are made."""


class Watched:
    """A batch, and what was last seen of it."""

    def __init__(self, entry: Entry, batch: Batch) -> None:
        self.entry = entry
        self.batch = batch
        self.seen_at = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.batch.status in ENDED

    @property
    def done(self) -> int:
        """Lines with a result."""
        counts = self.batch.request_counts
        return counts.completed + counts.failed if counts else 0

    @property
    def half_done(self) -> bool:
        """Whether some lines are done and others are not, as known a moment ago."""
        counts = self.batch.request_counts
        fresh = time.monotonic() - self.seen_at < FRESH_SECONDS
        return fresh and counts is not None and 0 < self.done < counts.total

    def take(self, now: Batch) -> None:
        """Hold an answer against the one before. AssertionError where it goes back."""
        check_step(self.batch, now)
        self.batch, self.seen_at = now, time.monotonic()


class Load:
    """Runs batches until told to stop; all its tasks end with its context."""

    def __init__(self, client: Client, ledger: Ledger, rng: random.Random, prefix: str) -> None:
        """Prepare it.

        Args:
            client: asks for everything.
            ledger: gets an entry for each batch.
            rng: draws the batches.
            prefix: begins every idempotency key, unique for the round.
        """
        self._client = client
        self._ledger = ledger
        self._rng = rng
        self._prefix = prefix
        self._stopping = False
        self.watched: list[Watched] = []
        """All batches that were acknowledged."""
        self.progressed = asyncio.Condition()
        """Notified whenever something new was seen."""

    def half_done(self) -> bool:
        """Whether some batch has lines that are done and others that are not."""
        return any(each.half_done for each in self.watched)

    def stop(self) -> None:
        """Begin no more batches; those that run go on."""
        self._stopping = True

    async def run(self) -> None:
        """Keep batches running; returns when told to stop and all have ended.

        Raises:
            ExceptionGroup: of `Violation` and other AssertionError.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep("steady", steady_or_deadly))
            group.create_task(self._keep("steadier", steady))
            for number in range(BESIDE):
                group.create_task(self._keep(f"other{number}", any_other))

    async def _keep(self, name: str, draw: Callable[[random.Random, str], Order]) -> None:
        number = 0
        while not self._stopping:
            number += 1
            key = f"{self._prefix}-{name}-{number}"
            await self._one(key, draw(self._rng, key))

    async def _one(self, key: str, order: Order) -> None:
        entry = Entry(key=key, order=order, in_parts=self._rng.random() < IN_PARTS)
        self._ledger.entries.append(entry)
        watched = Watched(entry, await self._client.submit(entry))
        self.watched.append(watched)
        cancel: asyncio.Task[None] | None = None
        try:
            while not watched.ended:
                if cancel is None and self._is_time_to_cancel(watched):
                    cancel = asyncio.create_task(self._client.cancel(entry))
                await asyncio.sleep(POLL_SECONDS)
                await self._poll(watched)
            if cancel is not None:
                await cancel
        finally:
            if cancel is not None:
                cancel.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await cancel
        file_id = watched.batch.output_file_id
        if file_id is not None and self._rng.random() < DELETED:
            await check_batch(self._client, entry)
            await self._client.delete_output(entry, file_id)

    def _is_time_to_cancel(self, watched: Watched) -> bool:
        at = watched.entry.order.cancel_at
        return at is not None and watched.done >= at * len(watched.entry.order.lines)

    async def _poll(self, watched: Watched) -> None:
        async def retrieve(client: AsyncOpenAI) -> Batch:
            return await client.batches.retrieve(watched.entry.batch_id)

        try:
            watched.take(await self._client.ask(retrieve))
        except RETRIED:
            return
        except openai.APIStatusError as refused:
            raise Violation(f"{watched.entry.key} is not there: {refused}") from refused
        async with self.progressed:
            self.progressed.notify_all()


def steady_or_deadly(rng: random.Random, name: str) -> Order:
    """Steady work, or now and then lines that end engines."""
    return rng.choices((steady, deadly, poison), (85, 10, 5))[0](rng, name)


def any_other(rng: random.Random, name: str) -> Order:
    """One of those that run beside it."""
    return rng.choice(OTHERS)(rng, name)
