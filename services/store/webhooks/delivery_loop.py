"""Sends webhooks from the `deliveries` table: each at least once, a few at a time."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import prometheus_client
import sqlalchemy as sa

from services.kit.process.log import get_logger
from services.store.context import Context
from services.store.domain import webhooks
from services.store.domain.receivers import Receivers, Waiting
from services.store.webhooks import deliveries_repo, webhooks_repo
from services.store.webhooks.sender import Answer, Message, Sender

_log = get_logger(__name__)

Row = sa.Row[Any]

LEASE_MS: Final = 60_000
"""Longer than an attempt takes."""
_DRAIN_SECONDS: Final = 2.0

_ATTEMPTS = prometheus_client.Counter(
    "nightshift_webhook_attempts_total",
    "Attempts to deliver a webhook, by outcome: delivered, retried or given_up.",
    ["outcome"],
)


class Deliveries:
    """Claims what is due, sends it, and records what came of it."""

    def __init__(
        self,
        context: Context,
        sender: Sender,
        receivers: Receivers,
        *,
        chance: Callable[[], float],
    ) -> None:
        """Deliver for the store of `context`.

        Args:
            context: the store's resources.
            sender: does one attempt; outlives this.
            receivers: knows how endpoints behave, and whose turn it is.
            chance: returns numbers from 0 to 1, which spread the retries.
        """
        self._context = context
        self._sender = sender
        self._receivers = receivers
        self._chance = chance
        self._holder = context.db.holder
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run_once(self) -> int:
        """Begin all attempts that are due and for which there is room; return how many."""
        begun = 0
        while chosen := await self._choose():
            for row in await self._claim(chosen):
                self._receivers.begin(_waiting(row))
                task = asyncio.create_task(self._attempt(row), name=f"webhook-{row.id}")
                self._running[row.id] = task
                begun += 1
        return begun

    @property
    def sending(self) -> int:
        """How many attempts run."""
        return len(self._running)

    async def settle(self) -> None:
        """Wait until what was begun has ended."""
        while self._running:
            await asyncio.wait(self._running.values())

    async def close(self) -> None:
        """Let what runs end for a moment, then cut it off; it will be sent again."""
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                await self.settle()
        except TimeoutError:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choose(self) -> list[str]:
        """Return ids of what is to be sent now, at most one for each endpoint."""
        rows = await self._context.db.read(
            lambda connection: deliveries_repo.due(
                connection,
                now_ms=self._context.now_ms(),
                others_dead=self._context.db.others_dead,
            )
        )
        # What runs here may be due again where its lease has lapsed.
        first = {_waiting(row): row.id for row in rows if row.id not in self._running}
        chosen = self._receivers.choose(first, self._context.clock.monotonic())
        return [first[one] for one in chosen]

    async def _claim(self, ids: list[str]) -> list[Row]:
        return await self._context.db.write(
            "delivery.claim",
            lambda connection: deliveries_repo.claim(
                connection,
                ids,
                holder=self._holder,
                now_ms=self._context.now_ms(),
                lease_ms=LEASE_MS,
                others_dead=self._context.db.others_dead,
            ),
        )

    async def _attempt(self, row: Row) -> None:
        clock = self._context.clock
        began = ended = clock.monotonic()
        answered = False
        try:
            answer = await self._send(row)
            ended, answered = clock.monotonic(), answer.status is not None
            await self._record(row, answer)
        except Exception:  # noqa: BLE001 - logged; its lease lapses and it is sent again
            _log.exception("webhook_not_recorded", delivery=row.id, endpoint=row.endpoint_id)
        finally:
            del self._running[row.id]
            pause = self._receivers.end(
                _waiting(row), seconds=ended - began, answered=answered, now=ended
            )
            if pause:
                _log.warning("webhook_endpoint_hangs", endpoint=row.endpoint_id, pause_s=pause)
            self._context.wake("deliveries")

    async def _send(self, row: Row) -> Answer:
        message = Message(
            id=row.id,
            url=row.url,
            payload=row.payload,
            secrets=webhooks_repo.live_secrets(row.secrets, self._context.now_ms()),
        )
        try:
            return await self._sender.send(message, self._context.clock.now())
        except Exception:  # noqa: BLE001 - whatever it is, the next attempt waits longer
            _log.exception("webhook_attempt_failed", delivery=row.id, endpoint=row.endpoint_id)
            return Answer(status=None, error="it could not be sent; the store's log says why")

    async def _record(self, row: Row, answer: Answer) -> None:
        now_ms = self._context.now_ms()
        next_ms = None
        if answer.error is not None:
            next_ms = webhooks.next_try_ms(now_ms, row.since_ms, row.attempts, self._chance())
        still_hangs = answer.status is None and self._receivers.hangs(row.endpoint_id)

        def record(connection: sa.Connection) -> None:
            deliveries_repo.record(
                connection,
                row,
                holder=self._holder,
                status=answer.status,
                error=answer.error,
                next_ms=next_ms,
                now_ms=now_ms,
            )
            if still_hangs:
                # One attempt at a time is too few to give up each on its own.
                deliveries_repo.give_up_late(connection, row.endpoint_id, now_ms)

        await self._context.db.write("delivery.record", record)
        outcome = "delivered"
        if answer.error is not None:
            outcome = "given_up" if next_ms is None else "retried"
        _ATTEMPTS.labels(outcome).inc()
        _log.info(
            "webhook_attempt",
            outcome=outcome,
            delivery=row.id,
            endpoint=row.endpoint_id,
            batch=row.batch_id,
            attempt=row.attempts,
            status=answer.status,
            error=answer.error,
        )


def _waiting(row: Row) -> Waiting:
    return Waiting(project_id=row.project_id, endpoint_id=row.endpoint_id)
