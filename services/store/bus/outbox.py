"""What others must be told: a row in the transaction that caused it, relayed to the bus later."""

import asyncio
from typing import Final

import sqlalchemy as sa

from protos.nightshift.v1 import dispatch_pb2
from services.kit.messages import bus as kit_bus
from services.kit.messages.subjects import event_subject
from services.kit.process.log import get_logger
from services.kit.wire.ids import ProjectId
from services.store.db.database import Database
from services.store.tables.core import outbox

_log = get_logger(__name__)

_BATCH = 256

_INSERT: Final = outbox.insert().inline()
_WAITING: Final = (
    sa.select(outbox.c.id, outbox.c.subject, outbox.c.payload).order_by(outbox.c.id).limit(_BATCH)
)
_FORGET: Final = outbox.delete().where(outbox.c.id.in_(sa.bindparam("ids", expanding=True)))


def emit(
    connection: sa.Connection, event: dispatch_pb2.Event, project_id: ProjectId, now_ms: int
) -> None:
    """Add an event to the transaction; wake the `outbox` loop once it is committed."""
    connection.execute(
        _INSERT,
        {
            "project_id": project_id,
            "subject": event_subject(event),
            "payload": event.SerializeToString(),
            "created_ms": now_ms,
        },
    )


class Outbox:
    """Relays rows to the bus, in order, each under its row id as message id."""

    def __init__(self, db: Database) -> None:
        """Relay rows of `db`; nothing happens until a bus is attached."""
        self._db = db
        self._bus: kit_bus.Bus | None = None
        self._refused = asyncio.Event()

    def attach(self, bus: kit_bus.Bus) -> None:
        """Use `bus` from now on."""
        self._bus = bus

    async def refused(self, within_seconds: float) -> bool:
        """Wait until the bus takes no event, for so long at most; tell whether it was so."""
        self._refused.clear()
        try:
            async with asyncio.timeout(within_seconds):
                await self._refused.wait()
        except TimeoutError:
            return False
        return True

    async def run_once(self) -> int:
        """Relay everything that waits and return how many; what fails stays for the next turn."""
        try:
            return await self._relay()
        except kit_bus.BusFault as fault:
            # Its stream may be gone; who keeps the bus makes it again.
            _log.warning("events_wait_for_bus", error=str(fault) or type(fault).__name__)
            self._refused.set()
            return 0

    async def _relay(self) -> int:
        relayed = 0
        while self._bus is not None and self._bus.connected:
            rows = await self._db.read(lambda connection: connection.execute(_WAITING).all())
            if not rows:
                break
            bus = self._bus
            await asyncio.gather(
                *(bus.publish_event(row.subject, row.payload, f"outbox-{row.id}") for row in rows)
            )
            done = [row.id for row in rows]
            await self._db.write(
                "outbox.forget",
                lambda connection, done=done: connection.execute(  # type: ignore[misc]  # bound now
                    _FORGET, {"ids": done}
                ),
            )
            relayed += len(rows)
            if len(rows) < _BATCH:
                # Whoever adds one wakes this loop once it is committed.
                break
        return relayed
