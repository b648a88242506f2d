"""Deletes what nothing names any more."""

import asyncio

import sqlalchemy as sa

from services.store import (
    blobs_repo,
    deliveries_repo,
    files_repo,
    holds_repo,
    idempotency_repo,
    uploads_repo,
)
from services.store.context import Context

_AT_ONCE = 64
_ROWS_AT_ONCE = 1_000
ABANDONED_SECONDS = 24 * 3_600
"""Longer than any upload takes; what is announced and not named by then never will be."""


class Sweeper:
    """Purges files that are gone, expires uploads, and deletes doomed blobs."""

    def __init__(self, context: Context) -> None:
        """Sweep the store of `context`."""
        self._context = context

    async def run_once(self) -> int:
        """Delete everything that may go now and return how many blobs went."""
        now_ms = self._context.now_ms()
        await self._context.db.write(
            "sweep.doom_abandoned", lambda connection: _forget_lapsed(connection, now_ms)
        )
        while await self._context.db.write(
            "sweep.expire_upload",
            lambda connection: uploads_repo.expire_one(connection, now_ms // 1000),
        ):
            pass
        while await self._context.db.write(
            "sweep.purge_file",
            lambda connection: files_repo.purge(connection, now_ms // 1000, _AT_ONCE),
        ):
            pass
        while await self._context.db.write(
            "sweep.forget_keys",
            lambda connection: idempotency_repo.forget_old(connection, now_ms, _ROWS_AT_ONCE),
        ):
            pass
        while await self._context.db.write(
            "sweep.purge_deliveries",
            lambda connection: deliveries_repo.purge(connection, now_ms, _ROWS_AT_ONCE),
        ):
            pass
        deleted = 0
        while names := await self._context.db.read(
            lambda connection: blobs_repo.deletable(connection, _AT_ONCE, self._context.now_ms())
        ):
            await asyncio.gather(
                *(self._context.blobs.delete("sweep.delete_blob", name) for name in names)
            )
            await self._context.db.write(
                "sweep.forget_blobs",
                lambda connection, names=names: blobs_repo.forget(connection, names),  # type: ignore[misc]  # bound now
            )
            deleted += len(names)
        return deleted


def _forget_lapsed(connection: sa.Connection, now_ms: int) -> None:
    blobs_repo.doom_abandoned(connection, now_ms - ABANDONED_SECONDS * 1000)
    holds_repo.forget_lapsed(connection, now_ms)
