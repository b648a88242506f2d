"""Checks everything that stands in a store's data directory, read-only, run by `nightshift doctor`.

`python -m services.store.checkup.doctor [--deep]`, on the directory and the database that the
settings of the store name, whether a store works on them or not. It writes JSON lines on standard
output (see `checkup.report`) and exits with 0 where all is well, 1 where something is wrong, and 2
where it could not be told.
"""

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Final, NoReturn

import orjson
import sqlalchemy as sa

from services.kit.process import log
from services.kit.process.settings import SettingsError
from services.kit.wire.errors import NightshiftError
from services.store.blobs.reader import BlobReader, blob_reader
from services.store.checkup import database_check, files_check, rest_check
from services.store.checkup.batches_check import Kinds, OpenBatches
from services.store.checkup.blob_list import ListedBlobs
from services.store.checkup.blobs_check import Blobs
from services.store.checkup.ended_check import EndedBatches
from services.store.checkup.report import Report, Write
from services.store.checkup.rows_read import MovedError, View
from services.store.db import migrate
from services.store.db.database import Database
from services.store.domain.checks import statement
from services.store.settings import StoreSettings
from services.store.snapshot import scratch, take_snapshot
from services.store.snapshot.hold import Hold

WELL: Final = 0
FAULTS: Final = 1
CANNOT: Final = 2
INTERRUPTED: Final = 130


class CannotCheckError(Exception):
    """It cannot be told whether all is well; the message says why and what to do."""


def check(settings: StoreSettings, write: Write, *, deep: bool) -> int:
    """Check all that the store of these settings holds and return how many faults there are.

    An SQLite file is read as it lies there. Of a PostgreSQL a copy of all rows is checked, beside
    blobs that are kept from being deleted meanwhile.

    Args:
        settings: the store's.
        write: told of everything, as `checkup.report` has it.
        deep: also reads the content of every file, which takes as long as reading it does.

    Raises:
        CannotCheckError: there is nothing that could be checked.
        SettingsError: a setting is none.
    """
    database = take_snapshot.sqlite_file(settings.sqlalchemy_url)
    try:
        if database is None:
            return asyncio.run(_check_copy(settings, write, deep=deep))
        return _check_file(database, settings, write, deep=deep)
    except (database_check.SchemaError, NightshiftError) as error:
        raise CannotCheckError(str(error)) from None


def _check_file(database: Path, settings: StoreSettings, write: Write, *, deep: bool) -> int:
    if not database.is_file():
        raise CannotCheckError(
            f"there is no {database}: name the directory of `nightshift up` with --data"
        )
    while True:
        view = _open(database, blob_reader(settings))
        try:
            database_check.check_revision(view)
            faults = _check_all(view, settings, Report(write), deep=deep)
            view.check_still()
        except MovedError:
            # It is open now, so that the next time it is read as one that is.
            write({"event": "again"})
            continue
        except sa.exc.DatabaseError as error:
            raise _unreadable(database, error) from error
        finally:
            view.close()
        return faults


async def _check_copy(settings: StoreSettings, write: Write, *, deep: bool) -> int:
    with (
        scratch.folder() as folder,
        contextlib.closing(Database(settings.sqlalchemy_url)) as db,
    ):
        try:
            await asyncio.to_thread(db.check)
            database_check.check_known(await db.read(migrate.revision))
        except sa.exc.DBAPIError as error:
            raise CannotCheckError(f"the database cannot be read: {error.orig}") from None
        async with Hold(db):
            # Before the rows are: whatever is in the list then was announced by them.
            blobs = await asyncio.to_thread(ListedBlobs, blob_reader(settings), folder / "blobs")
            copy = folder / "rows.db"
            await take_snapshot.take(db, settings.sqlalchemy_url, copy, lambda _rows: None)
            report = Report(write, render=statement.for_postgresql)
            return await asyncio.to_thread(_check_rows, copy, blobs, settings, report, deep=deep)


def _check_rows(
    copy: Path, blobs: BlobReader, settings: StoreSettings, report: Report, *, deep: bool
) -> int:
    """Check a copy of all rows; in one thread, since SQLite's connections belong to theirs."""
    view = View(copy, blobs, is_copy=True)
    try:
        return _check_all(view, settings, report, deep=deep)
    finally:
        view.close()


def _open(database: Path, blobs: BlobReader) -> View:
    try:
        return View(database, blobs)
    except OSError as error:
        raise CannotCheckError(f"{database} cannot be read: {error.strerror}") from error


def _unreadable(database: Path, error: sa.exc.DatabaseError) -> CannotCheckError:
    return CannotCheckError(
        f"{database} cannot be read: {error.orig}. Is it a store's database, and may you read it? "
        "If it is damaged, restore it from a backup"
    )


def _check_all(view: View, settings: StoreSettings, report: Report, *, deep: bool) -> int:
    """Check everything, blobs first and last: see `Blobs` for why in this order."""
    blobs = Blobs(view)
    with report.kind("database") as kind:
        database_check.check(view, kind, deep=deep)
    with report.kind("secret") as kind:
        # One that is given may have to be read by several users.
        secret = settings.secret_file or settings.data_dir / "secret"
        rest_check.check_secret(secret, kind, is_ours=settings.secret_file is None)
    with report.kind("blobs") as of_blobs:
        blobs.look(of_blobs)
        with report.kind("uploads") as kind:
            files_check.check_uploads(view, blobs, kind)
        # Whatever is entered last is told of first.
        with report.kind("line indexes") as indexes, report.kind("files") as kind:
            files_check.Files(view, blobs, settings, deep=deep).check(kind, indexes)
        _check_batches(view, blobs, report, deep=deep)
        if report.is_whole:
            # Otherwise somebody who names a blob may not have been heard.
            blobs.judge(of_blobs)
    with report.kind("outbox") as kind:
        rest_check.check_outbox(view, kind)
    with report.kind("leadership") as kind:
        rest_check.check_leadership(view, kind)
    with report.kind("webhooks") as kind:
        rest_check.check_webhooks(view, kind)
    with report.kind("keys") as kind:
        rest_check.check_keys(view, kind)
    with report.kind("projects") as kind:
        rest_check.check_projects(view, kind)
    with report.kind("holds") as kind:
        rest_check.check_holds(view, kind)
    return report.faults


def _check_batches(view: View, blobs: Blobs, report: Report, *, deep: bool) -> None:
    with (
        report.kind("attempts") as attempts,
        report.kind("chunks") as chunks,
        report.kind("results") as results,
        report.kind("open batches") as kind,
    ):
        kinds = Kinds(batches=kind, results=results, chunks=chunks, attempts=attempts)
        OpenBatches(view, blobs, kinds, deep=deep).check()
    with report.kind("ended batches") as kind:
        EndedBatches(view, blobs, kind, deep=deep).check()


def _say(said: dict[str, object]) -> None:
    sys.stdout.buffer.write(orjson.dumps(said) + b"\n")
    sys.stdout.buffer.flush()


def main() -> NoReturn:
    """Check, say what came of it, and exit."""
    parser = argparse.ArgumentParser(
        prog="python -m services.store.checkup.doctor", description=__doc__
    )
    parser.add_argument("--deep", action="store_true", help="read the content of every file too")
    deep = parser.parse_args().deep
    # Standard output is for what is found.
    log.configure("doctor", "ERROR")
    scratch.clear()
    try:
        faults = check(StoreSettings.load(), _say, deep=deep)
    except (CannotCheckError, SettingsError) as error:
        _say({"event": "cannot", "why": str(error)})
        sys.exit(CANNOT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(FAULTS if faults else WELL)


if __name__ == "__main__":
    main()
