"""Keeps every blob of a store where it is while they are read."""

import asyncio
import contextlib
from types import TracebackType
from typing import Final, Self

import sqlalchemy as sa

from services.kit.process.log import get_logger
from services.kit.wire.errors import UnavailableError
from services.kit.wire.ids import uuid7_hex
from services.store.blobs import holds_repo
from services.store.db.database import Database
from services.store.snapshot.take_snapshot import now_ms

_log = get_logger(__name__)

_RENEW_SECONDS: Final = 30.0


class Hold:
    """A hold on a store's sweeper, moved along while the block runs, and let go after it."""

    def __init__(self, db: Database) -> None:
        """Hold the sweepers of all stores on `db`."""
        self._db = db
        self._id = uuid7_hex()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Take it; from now on nothing is deleted that is named by then."""
        await self._move()
        self._task = asyncio.create_task(self._keep(), name="hold")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let it go; where the database does not answer, it ends by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(UnavailableError):
            await self._db.write(
                "backup.release", lambda connection: holds_repo.release(connection, self._id)
            )

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            try:
                await self._move()
            except UnavailableError:
                # There are nine more turns; and if it lapses, a blob that went is noticed.
                _log.warning("hold_not_renewed")

    async def _move(self) -> None:
        def hold(connection: sa.Connection) -> None:
            holds_repo.hold(connection, self._id, now_ms(connection) + holds_repo.HOLD_MS)

        await self._db.write("backup.hold", hold)
