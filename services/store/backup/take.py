"""Takes a backup of a store that runs: hold the sweeper, take the rows, copy what they name."""

import asyncio
import contextlib
import importlib.metadata
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from services.kit.process import failpoints
from services.store.backup import sizes
from services.store.backup.after_restore import settle
from services.store.backup.copy_blobs import Copied, Copier, CopyError
from services.store.backup.target import FORMAT, BackupError, Facts, Place, sha256
from services.store.blobs.local import LocalBlobs
from services.store.blobs.reader import UNFINISHED, FolderReader, blob_reader
from services.store.blobs.where_kept import folder_of
from services.store.checkup.database_check import check_known
from services.store.db import migrate
from services.store.db.database import Database
from services.store.settings import StoreSettings
from services.store.snapshot import copy_rows, take_snapshot
from services.store.snapshot.hold import Hold
from services.store.tables.core import blobs

Write = Callable[[dict[str, object]], None]

_PAGE = 500


async def take(settings: StoreSettings, to: Path, reuse: Path | None, write: Write) -> Facts:
    """Make a backup at `to` of the store of these settings, whether it runs or not.

    Args:
        settings: where its database and blobs are.
        to: a directory that is to be made, or one that was not finished.
        reuse: an older backup, whose blobs are linked rather than copied where they are the same.
        write: told of progress.

    Raises:
        BackupError: there is nothing to back up, or something else at `to`.
        SchemaError: the database is of another version.
        CopyError: the directory of blobs is not there.
        OSError: it cannot be written.
    """
    file = take_snapshot.sqlite_file(settings.sqlalchemy_url)
    if file is not None and not file.is_file():
        raise BackupError(f"there is no {file}: name the directory of `nightshift up` with --data")
    _refuse_within(settings.data_dir, to)
    older = None if reuse is None else Place(reuse)
    if older is not None:
        older.facts()
    place = Place(to)
    with place.being_made(), contextlib.closing(Database(settings.sqlalchemy_url)) as db:
        await asyncio.to_thread(db.check)
        check_known(await db.read(migrate.revision))
        async with Hold(db):
            taken_at = int(time.time())
            failpoints.before("backup.rows")
            await take_snapshot.take(
                db,
                settings.sqlalchemy_url,
                place.database,
                lambda done: write({"event": "progress", "what": "rows", "done": done}),
            )
            rows = await asyncio.to_thread(_settle, place.database)
            failpoints.after("backup.rows")
            copied = await _copy_blobs(settings, place, older, write)
        facts = _facts(place, copied, taken_at=taken_at, rows=rows)
        failpoints.before("backup.finish")
        place.finish(facts)
        failpoints.after("backup.finish")
    return facts


def _facts(place: Place, copied: Copied, *, taken_at: int, rows: int) -> Facts:
    return Facts(
        format=FORMAT,
        schema=migrate.HEAD,
        version=importlib.metadata.version("nightshift"),
        taken_at=taken_at,
        rows=rows,
        blobs=copied.blobs,
        bytes=copied.bytes,
        database_sha256=sha256(place.database),
        missing=copied.missing,
    )


def _refuse_within(data_dir: Path, to: Path) -> None:
    if to.resolve().is_relative_to(data_dir.resolve()):
        raise BackupError(
            f"{to} lies within what is to be backed up ({data_dir}): name a directory elsewhere, "
            "best on another disk"
        )


def _settle(database: Path) -> int:
    with take_snapshot.opened(database) as connection:
        settle(connection, int(time.time() * 1000))
        return copy_rows.count(connection)


async def _copy_blobs(
    settings: StoreSettings, place: Place, older: Place | None, write: Write
) -> Copied:
    with take_snapshot.opened(place.database) as connection:
        of = connection.scalar(sa.select(sa.func.count()).select_from(blobs))
        copier = Copier(
            "backup.blob",
            blob_reader(settings),
            LocalBlobs(place.blobs),
            FolderReader(place.blobs),
            lambda done, size: write(
                {"event": "progress", "what": "blobs", "done": done, "of": of, "bytes": size}
            ),
        )
        if older is not None:
            copier.reuse(older.blobs, place.blobs)
        # What the store has lost must not keep the rest from being saved.
        copied = await copier.copy(live_names(connection), may_lack=None)
        _refuse_away(settings, copied)
        _drop_unnamed(place.blobs, connection)
    # Of a blob that is cut short, what is left is in the copy; it counts as lost all the same.
    damaged = await asyncio.to_thread(_damaged, place)
    return replace(copied, missing=tuple(sorted({*copied.missing, *damaged})))


def _damaged(place: Place) -> list[str]:
    with take_snapshot.opened(place.database) as connection:
        return sizes.damaged(connection, FolderReader(place.blobs))


def _refuse_away(settings: StoreSettings, copied: Copied) -> None:
    """Tell blobs that are lost from a directory that is."""
    folder = folder_of(settings)
    # A store makes it; of a bucket its reader tells.
    if copied.missing and folder is not None and not (folder / UNFINISHED).is_dir():
        raise CopyError(
            f"{len(copied.missing)} blobs are missing, and {folder} does not look like a directory "
            "of blobs: look whether its disk is mounted, and whether the settings name the right "
            "one"
        )


def live_names(connection: sa.Connection) -> Iterator[str]:
    """Yield the names of all blobs that a copy's rows name, in order."""
    last = ""
    while True:
        names = connection.scalars(
            sa.select(blobs.c.name).where(blobs.c.name > last).order_by(blobs.c.name).limit(_PAGE)
        ).all()
        if not names:
            return
        yield from names
        last = names[-1]


def _drop_unnamed(folder: Path, connection: sa.Connection) -> None:
    """Remove what an earlier try copied and nothing names any more."""
    for name, _ in FolderReader(folder).names():
        if connection.scalar(sa.select(blobs.c.name).where(blobs.c.name == name)) is None:
            (folder / name).unlink()
