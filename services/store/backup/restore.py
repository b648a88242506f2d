"""Puts a backup back into an empty store of either kind.

All of it comes into force in one last step: the rename of the database's file, or the commit of all
rows. A store that is started before finds nothing, or refuses; what was begun is gone on with.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from services.kit import fsync
from services.kit.process import failpoints
from services.store.backup.after_restore import settle
from services.store.backup.copy_blobs import Copier
from services.store.backup.take import Write, live_names
from services.store.backup.target import BackupError, Facts, Place, sync_tree
from services.store.blobs.reader import FolderReader, blob_reader
from services.store.blobs.where_kept import folder_of, open_blobs
from services.store.checkup import doctor
from services.store.db import migrate
from services.store.db.database import Database
from services.store.db.only_store import UNFINISHED, only_store
from services.store.settings import StoreSettings
from services.store.snapshot import copy_rows, scratch, take_snapshot
from services.store.tables.core import blobs


async def restore(
    source: Path, settings: StoreSettings, write: Write, *, with_faults: bool = False
) -> Facts:
    """Put the backup at `source` back into the empty store of these settings.

    Args:
        source: a whole backup.
        settings: where its database and blobs are to be; nothing stands there yet.
        write: told of progress.
        with_faults: whether it is put back although rows and blobs contradict each other in it.

    Raises:
        BackupError: the backup is not whole or has faults, or something stands there already.
        CopyError: a blob cannot be copied.
        SettingsError: a store works there.
        OSError: it cannot be written.
    """
    place = Place(source)
    facts = await asyncio.to_thread(place.facts)
    with _target(settings) as (work, file):
        await asyncio.to_thread(_prepare, place, work)
        failpoints.after("restore.begin")
        if not with_faults:
            await asyncio.to_thread(_check, place, work, facts)
        with take_snapshot.opened(work) as connection:
            await _copy_blobs(settings, place, connection, facts, write)
        failpoints.before("restore.finish")
        if file is None:
            await asyncio.to_thread(_commit_rows, settings, work, write)
        else:
            fsync.sync(work)
            work.rename(file)
            fsync.sync(file.parent)
        failpoints.after("restore.finish")
    return facts


@contextlib.contextmanager
def _target(settings: StoreSettings) -> Iterator[tuple[Path, Path | None]]:
    """Yield where to work on the rows, and the file to rename that to, where it is SQLite's."""
    file = take_snapshot.sqlite_file(settings.sqlalchemy_url)
    if file is None:
        with scratch.folder() as folder:
            with contextlib.closing(Database(settings.sqlalchemy_url)) as db:
                db.check()
                migrate.upgrade(db.writer_engine, int(time.time()))
                if not db.run(copy_rows.is_fresh):
                    raise _not_empty("the database holds rows")
            yield folder / UNFINISHED, None
        return
    fsync.make(settings.data_dir.absolute().parent)
    settings.data_dir.mkdir(mode=0o700, exist_ok=True)
    with only_store(settings.data_dir, restoring=True):
        if file.exists():
            raise _not_empty(f"there is {file}")
        yield file.with_name(UNFINISHED), file


def _not_empty(why: str) -> BackupError:
    return BackupError(
        f"{why} already, and a backup is put back into an empty store only: name another place, or "
        "move away what is there"
    )


def _prepare(place: Place, work: Path) -> None:
    """Copy the rows, bring them to this version, and make what they hold of others void."""
    failpoints.before("restore.begin")
    for ending in ("-wal", "-shm", "-journal"):
        work.with_name(f"{work.name}{ending}").unlink(missing_ok=True)
    work.touch(mode=0o600)
    shutil.copyfile(place.database, work)
    with take_snapshot.opened(work, migrated=True) as connection:
        settle(connection, int(time.time() * 1000))


def _check(place: Place, work: Path, facts: Facts) -> None:
    """Check rows against blobs before anything is made of them.

    Raises:
        BackupError: something is wrong, besides what was lost before the backup was taken.
    """
    lost = set(facts.missing)
    known = 0

    def hear(said: dict[str, object]) -> None:
        nonlocal known
        if said["event"] == "fault":
            known += said["blob"] in lost
        elif said["event"] == "kind" and lost:
            # Their names are compared when they are copied.
            known += int(str(said["untold_lost"]))

    settings = StoreSettings(
        data_dir=place.root, database_url=f"sqlite:///{work}", blobs_url="", secret_file=None
    )
    faults = doctor.check(settings, hear, deep=False) - known
    if faults:
        raise BackupError(
            f"{place.root} has {faults} faults: `nightshift doctor --check --data {place.root}` "
            "names them. Put another backup back, mend a copy of this one and start on that, or "
            "take this one as it is with --with-faults"
        )


async def _copy_blobs(
    settings: StoreSettings, place: Place, connection: sa.Connection, facts: Facts, write: Write
) -> None:
    present = blob_reader(settings)
    await asyncio.to_thread(_refuse_others, present.names(), connection)
    of = connection.scalar(sa.select(sa.func.count()).select_from(blobs))
    target = open_blobs(settings)
    copier = Copier(
        "restore.blob",
        FolderReader(place.blobs),
        target,
        present,
        lambda done, size: write(
            {"event": "progress", "what": "blobs", "done": done, "of": of, "bytes": size}
        ),
    )
    try:
        await copier.copy(live_names(connection), may_lack=frozenset(facts.missing))
    finally:
        await target.close()
    folder = folder_of(settings)
    if folder is not None:
        sync_tree(folder)


def _refuse_others(present: Iterator[tuple[str, int]], connection: sa.Connection) -> None:
    """Take what an earlier try copied as ours, and nothing else.

    Raises:
        BackupError: there is another blob.
    """
    for name, _ in present:
        if connection.scalar(sa.select(blobs.c.name).where(blobs.c.name == name)) is None:
            raise _not_empty(f"there is a blob, {name}")


def _commit_rows(settings: StoreSettings, work: Path, write: Write) -> None:
    """Insert all rows in one transaction."""

    def insert(target: sa.Connection) -> None:
        if not copy_rows.is_fresh(target):
            raise _not_empty("the database holds rows")
        with take_snapshot.opened(work) as source:
            copy_rows.copy_all(
                source,
                target,
                lambda done: write({"event": "progress", "what": "rows", "done": done}),
            )

    with contextlib.closing(Database(settings.sqlalchemy_url)) as db:
        db.run(insert)
