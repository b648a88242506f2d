"""Deletes what nothing names any more."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import sqlalchemy as sa

from services.store.admin import idempotency_repo
from services.store.blobs import blobs_repo, holds_repo
from services.store.context import Context
from services.store.files import files_repo, uploads_repo
from services.store.webhooks import deliveries_repo

_AT_ONCE: Final = 64
_ROWS_AT_ONCE: Final = 1_000
_PARTS_AT_ONCE: Final = 1_000
"""Of files that are purged in one transaction: a part is a row, and takes 27 µs."""
_FAILED_PAGES: Final = 3
"""A page that cannot be deleted must not keep the next ones, but an outage need not try all."""
ABANDONED_SECONDS: Final = 24 * 3_600
"""Longer than any upload takes; what is announced and not named by then never will be."""


class Sweeper:
    """Purges files that are gone, expires uploads, and deletes doomed blobs."""

    def __init__(self, context: Context) -> None:
        """Sweep the store of `context`."""
        self._context = context

    async def run_once(self) -> int:
        """Delete everything that may go now and return how many blobs went.

        Raises:
            ExceptionGroup: something could not be done; all else was.
        """
        now_ms = self._context.now_ms()
        now_at = now_ms // 1000
        errors: list[Exception] = []
        # First, as it makes room on a disk that is too full for anything to be written.
        deleted = await self._delete_doomed(errors)
        steps: tuple[tuple[str, Callable[[sa.Connection], object]], ...] = (
            ("sweep.doom_abandoned", lambda connection: _forget_lapsed(connection, now_ms)),
            ("sweep.expire_upload", lambda connection: uploads_repo.expire_one(connection, now_at)),
            (
                "sweep.forget_keys",
                lambda connection: idempotency_repo.forget_old(connection, now_ms, _ROWS_AT_ONCE),
            ),
            (
                "sweep.purge_deliveries",
                lambda connection: deliveries_repo.purge(connection, now_ms, _ROWS_AT_ONCE),
            ),
        )
        for step, statement in steps:
            try:
                while await self._context.db.write(step, statement):
                    pass
            except Exception as error:  # noqa: BLE001 - the others have nothing to do with it
                errors.append(error)
        try:
            await self._purge_files(now_at)
        except Exception as error:  # noqa: BLE001 - likewise
            errors.append(error)
        deleted += await self._delete_doomed(errors)
        try:
            await self._context.db.erase()
        except Exception as error:  # noqa: BLE001 - likewise
            errors.append(error)
        if errors:
            raise ExceptionGroup("not all could be swept", errors)
        return deleted

    async def _purge_files(self, now_at: int) -> None:
        """Give up the blobs of files that are gone, a little at a time: other writers wait."""
        while found := await self._context.db.read(
            lambda connection: files_repo.to_purge(connection, now_at, _ROWS_AT_ONCE)
        ):
            purged = 0
            for some in _in_turns(found):
                purged += await self._context.db.write(
                    "sweep.purge_file",
                    lambda connection, some=some: files_repo.purge(connection, some, now_at),  # type: ignore[misc]  # bound now
                )
            if not purged:
                return

    async def _delete_doomed(self, errors: list[Exception]) -> int:
        deleted = failed = 0
        last = ""
        # Each look puts all that are doomed in order, so that many are taken from one.
        found: list[blobs_repo.Doomed] = []
        while failed < _FAILED_PAGES:
            try:
                if not found:
                    found = await self._deletable(last)
                if not found:
                    break
                doomed, found = found[:_AT_ONCE], found[_AT_ONCE:]
                names = [name for name, _ in doomed]
                last = names[-1]
                await self._context.blobs.delete("sweep.delete_blob", *names)
                await self._context.db.write(
                    "sweep.forget_blobs",
                    lambda connection, doomed=doomed: blobs_repo.forget(connection, doomed),  # type: ignore[misc]  # bound now
                )
                deleted += len(names)
            except Exception as error:  # noqa: BLE001 - the next page may go
                errors.append(error)
                failed += 1
        return deleted

    async def _deletable(self, after: str) -> list[blobs_repo.Doomed]:
        late_ms = self._context.blobs.late_seconds * 1000
        return await self._context.db.read(
            lambda connection: blobs_repo.deletable(
                connection, after, _ROWS_AT_ONCE, now_ms=self._context.now_ms(), late_ms=late_ms
            )
        )


def _in_turns(files: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the ids of files, so many at once as have `_PARTS_AT_ONCE` parts, or a single one."""
    some: list[str] = []
    parts = 0
    for file_id, of_file in files.items():
        if some and (len(some) == _AT_ONCE or parts + of_file > _PARTS_AT_ONCE):
            yield some
            some, parts = [], 0
        some.append(file_id)
        parts += of_file
    if some:
        yield some


def _forget_lapsed(connection: sa.Connection, now_ms: int) -> None:
    blobs_repo.doom_abandoned(connection, now_ms - ABANDONED_SECONDS * 1000, now_ms)
    holds_repo.forget_lapsed(connection, now_ms)
