"""What every part of the store is given."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import sqlalchemy as sa

from services.kit.process.clock import Clock
from services.kit.wire.ids import IdGenerator, ProjectId
from services.store.blobs.base import Blobs
from services.store.blobs.disk_space import Disk
from services.store.db.database import Database
from services.store.db.leases import Leases
from services.store.files.long_lines import LongLines
from services.store.settings import StoreSettings
from services.store.tables.core import counters

LoopName = Literal[
    "outbox",
    "validator",
    "finalizer",
    "ender",
    "poison",
    "sweeper",
    "deliveries",
    "events",
    "time",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Resources of a store process, made once in `main`.

    Attributes:
        wake: asks a background loop for a turn now; may be called from any thread.
        summing: held while usage is summed: that takes the longer the more batches there ever were,
            so one sum at a time leaves readers for all else.
        draining: set when the store stops; streams of executors end then, in order.
    """

    db: Database
    blobs: Blobs
    clock: Clock
    new_id: IdGenerator
    settings: StoreSettings
    wake: Callable[[LoopName], None]
    disk: Disk = field(default_factory=Disk)
    long_lines: LongLines = field(default_factory=LongLines)
    summing: asyncio.Lock = field(default_factory=asyncio.Lock)
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Carry the database's time by the clock of all others."""
        self.db.time.carry_by(self.clock)

    def now_ms(self) -> int:
        """Return the database's time in milliseconds since the epoch; nothing else decides."""
        return self.db.time.now_ms()

    def leases(self) -> Leases:
        """Return how the leases of attempts are judged now."""
        return Leases(int(self.settings.lease_seconds * 1000), self.db.time.heard_since_ms)

    def blob_name(self, project_id: ProjectId, kind: str) -> str:
        """Return a name for a new blob; `kind` is one of ours, never a user's text."""
        return f"{project_id}/{kind}/{self.new_id()}"


_NEXT_SEQ: Final = (
    counters.update()
    .where(counters.c.name == "seq")
    .values(n=counters.c.n + 1)
    .returning(counters.c.n)
)


def next_seq(connection: sa.Connection) -> int:
    """Return the next number of creation; its row's lock makes it the order of commit."""
    number: int = connection.scalar(_NEXT_SEQ)
    return number
