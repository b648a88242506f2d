"""What lies on disk before and after a story: rows and blobs, without a store."""

import asyncio
import atexit
import functools
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

import orjson
import sqlalchemy as sa

from services.kit.process.clock import ManualClock
from services.kit.wire.ids import uuid7_hex
from services.store.blobs.local import LocalBlobs
from services.store.checkup import doctor
from services.store.cleaning.sweeper import Sweeper
from services.store.context import Context
from services.store.db import migrate
from services.store.db.database import Database
from services.store.settings import StoreSettings
from services.store.tables.core import blobs
from tests.integration.store_work.harness import keep_fake_time

_A_DAY_LATER_SECONDS: Final = 25 * 3_600


async def check_all(database_url: str, folder: Path, data: Path, secret_file: Path | None) -> None:
    """Nothing contradicts itself, and a day later no blob is left that nothing names.

    Args:
        database_url: where the rows are.
        folder: where the blobs are.
        data: a store's data directory.
        secret_file: the services' secret, where it is not in there.
    """
    names = await _named_a_day_later(database_url, folder, data)
    on_disk = sorted(str(path.relative_to(folder)) for path in blob_files(folder))
    assert on_disk == names, "blobs that nothing names, or named ones that are gone"
    said: list[object] = []
    settings = StoreSettings(
        data_dir=data,
        database_url="" if database_url.startswith("sqlite") else database_url,
        blobs_url=folder.as_uri(),
        secret_file=secret_file,
    )
    faults = await asyncio.to_thread(doctor.check, settings, said.append, deep=True)
    assert faults == 0, orjson.dumps(said, option=orjson.OPT_INDENT_2).decode()


async def _named_a_day_later(database_url: str, folder: Path, data: Path) -> list[str]:
    """Sweep as a store that finds things a day old; return the blobs that are named then."""
    db = Database(database_url)
    keep_fake_time(db)
    try:
        context = Context(
            db=db,
            blobs=LocalBlobs(folder),
            clock=ManualClock(time.time() + _A_DAY_LATER_SECONDS),
            new_id=uuid7_hex,
            settings=StoreSettings(data_dir=data),
            wake=lambda _name: None,
        )
        await Sweeper(context).run_once()
        rows = await db.read(
            lambda connection: connection.execute(sa.select(blobs.c.name, blobs.c.state)).all()
        )
        await context.blobs.close()
    finally:
        db.close()
    assert {row.state for row in rows} <= {"live"}, rows
    return sorted(row.name for row in rows)


def change(database_url: str, *statements: str) -> None:
    """Change rows behind the stores' backs."""
    engine = sa.create_engine(_with_driver(database_url))
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))
    engine.dispose()


def look(database_url: str, query: str) -> int:
    """Look at the first value that a query finds."""
    engine = sa.create_engine(_with_driver(database_url))
    with engine.begin() as connection:
        found = connection.scalar(sa.text(query))
    engine.dispose()
    return int(found)


@functools.cache
def migrated() -> Path:
    """Make an SQLite database without rows once."""
    file = Path(tempfile.mkdtemp(prefix="nightshift-windows-")) / "nightshift.db"
    atexit.register(shutil.rmtree, file.parent, ignore_errors=True)
    migrate_now(f"sqlite:///{file}")
    return file


def migrate_now(url: str) -> None:
    """Make the schema of a store."""
    db = Database(url)
    try:
        migrate.upgrade(db.writer_engine, int(time.time()))
    finally:
        db.close()


def _with_driver(url: str) -> sa.URL:
    """Return a database's address with the driver that is installed."""
    made = sa.make_url(url)
    return made if made.drivername == "sqlite" else made.set(drivername="postgresql+psycopg")


def blob_files(folder: Path) -> list[Path]:
    """Every blob in a directory, those that are being written left out."""
    unfinished = folder / "tmp"
    return [path for path in folder.rglob("*") if path.is_file() and unfinished not in path.parents]
