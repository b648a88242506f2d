"""Ends what is cancelled or past its time.

Needs nothing but SQL: neither a scheduler nor a bus nor an executor.
"""

import asyncio
from typing import Any, Final

import sqlalchemy as sa

from protos.nightshift.v1 import dispatch_pb2
from services.kit.wire.ids import ProjectId
from services.store.batches import batches_repo
from services.store.batches.seal import seal
from services.store.bus import outbox
from services.store.context import Context
from services.store.domain.state import BatchStatus
from services.store.tables.core import EXPIRY_WHERE, STOPPING_WHERE, batches
from services.store.work import attempts_repo

Row = sa.Row[*tuple[Any, ...]]

STOP_MS: Final = 2_000
"""What executors are given to flush what is finished before a stopping batch is sealed."""
_AT_ONCE: Final = 64
_AHEAD_MS: Final = 1_000
_LEAST_MS: Final = 10


class Ender:
    """Takes batches over their edge, on time."""

    def __init__(self, context: Context) -> None:
        """End batches of `context`."""
        self._context = context
        self._timer: asyncio.TimerHandle | None = None

    async def run_once(self) -> int:
        """Stop what is late, seal what has stopped; return how many."""
        moved = 0
        while await self._context.db.read(self._late):
            moved += await self._context.db.write("batch.stop_late", self._stop_late)
        while await self._context.db.read(self._ready):
            sealed = await self._context.db.write("batch.seal", self._seal_ready)
            if not sealed:
                break
            moved += sealed
        if moved:
            self._context.wake("outbox")
            self._context.wake("finalizer")
            self._context.wake("deliveries")
            self._context.wake("events")
        await self._plan()
        return moved

    def _late(self, connection: sa.Connection) -> list[Row]:
        return list(
            connection.execute(
                sa.select(batches)
                .where(sa.text(EXPIRY_WHERE), batches.c.expires_ms <= self._context.now_ms())
                .order_by(batches.c.expires_ms)
                .limit(_AT_ONCE)
            )
        )

    def _stop_late(self, connection: sa.Connection) -> int:
        """Tell executors to stop; a batch that was never validated ends here."""
        now_ms = self._context.now_ms()
        late = self._late(connection)
        for row in late:
            project_id = ProjectId(row.project_id)
            kind = dispatch_pb2.EVENT_KIND_BATCH_EXPIRING
            if row.status == BatchStatus.VALIDATING:
                kind = dispatch_pb2.EVENT_KIND_BATCH_ENDED
                batches_repo.move(
                    connection,
                    row.id,
                    BatchStatus.EXPIRED,
                    now_ms,
                    sealed_ms=now_ms,
                    seal_outcome=BatchStatus.EXPIRED.value,
                )
            else:
                connection.execute(
                    batches.update().where(batches.c.id == row.id).values(stopping_ms=now_ms)
                )
            event = dispatch_pb2.Event(kind=kind, batch_id=row.id, pool_id=row.pool_id or "")
            outbox.emit(connection, event, project_id, now_ms)
        return len(late)

    def _stopping(self, connection: sa.Connection) -> list[Row]:
        return list(
            connection.execute(
                sa.select(batches)
                .where(sa.text(STOPPING_WHERE))
                .order_by(batches.c.stopping_ms)
                .limit(_AT_ONCE)
            )
        )

    def _ready(self, connection: sa.Connection) -> list[Row]:
        """Stopping batches with nothing to wait for; at most 2 s pass until all are."""
        now_ms, leases = self._context.now_ms(), self._context.leases()
        return [
            row
            for row in self._stopping(connection)
            # Later than now where the clock was set back.
            if abs(now_ms - row.stopping_ms) >= STOP_MS
            or not attempts_repo.any_open(connection, row.id, now_ms, leases)
        ]

    def _seal_ready(self, connection: sa.Connection) -> int:
        sealed = 0
        for row in self._ready(connection):
            outcome = BatchStatus.EXPIRED
            if row.status == BatchStatus.CANCELLING:
                outcome = BatchStatus.CANCELLED
            sealed += seal(connection, row, outcome, self._context.now_ms())
        return sealed

    async def _plan(self) -> None:
        """Take the next turn in time for what falls due before the next tick."""

        def next_due(connection: sa.Connection) -> int | None:
            expires = connection.scalar(
                sa.select(sa.func.min(batches.c.expires_ms)).where(sa.text(EXPIRY_WHERE))
            )
            stopping = connection.scalar(
                sa.select(sa.func.min(batches.c.stopping_ms)).where(sa.text(STOPPING_WHERE))
            )
            due = [expires, None if stopping is None else stopping + STOP_MS]
            return min((each for each in due if each is not None), default=None)

        due_ms = await self._context.db.read(next_due)
        if due_ms is None:
            return
        wait_ms = due_ms - self._context.now_ms()
        if self._timer is not None:
            self._timer.cancel()
        if wait_ms < _AHEAD_MS:
            self._timer = asyncio.get_running_loop().call_later(
                max(wait_ms, _LEAST_MS) / 1000, self._context.wake, "ender"
            )
