"""Starting on a database: it is waited for, checked and brought to this version's schema."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sqlalchemy.exc import DBAPIError

from services.kit.process.log import get_logger
from services.kit.process.settings import SettingsError
from services.kit.wire.errors import UnavailableError
from services.store.db import faults, migrate
from services.store.db.database import Database

_log = get_logger(__name__)

_FIRST_PAUSE_SECONDS: Final = 0.1
_MOST_PAUSE_SECONDS: Final = 2.0
_SAY_SECONDS: Final = 30.0
"""The same reason is logged no more often; another one at once."""


@contextlib.contextmanager
def using(path: Path, setting: str) -> Iterator[None]:
    """Make what is needed at `path`, which `setting` names.

    Raises:
        SettingsError: that cannot be done.
    """
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"{error.filename or path} cannot be used: {error.strerror}; {setting} names another "
            "place"
        ) from error


async def prepare(db: Database, stopping: asyncio.Event) -> bool:
    """Wait until the database can be worked on; tell whether it can, or the store is to stop.

    A database that is not there yet, or does not let the store in, is waited for as long as it
    takes: who runs it may be about to start it, or to make role and database. The log says so, and
    the store does not listen before.

    Raises:
        SettingsError: it is there and does not do; the message says what to change.
    """
    pause = _FIRST_PAUSE_SECONDS
    said, said_at = "", 0.0
    while not stopping.is_set():
        try:
            await asyncio.to_thread(_prepare, db)
        except (DBAPIError, UnavailableError) as error:
            cause = error.__cause__ or error
            if not (faults.worth_awaiting(error) or isinstance(error, UnavailableError)):
                if faults.is_of_settings(error):
                    raise SettingsError(
                        f"the database cannot be worked on: {faults.summary(cause)}; "
                        "NIGHTSHIFT_STORE_DATABASE_URL names it, and without that it is "
                        "nightshift.db in NIGHTSHIFT_STORE_DATA_DIR"
                    ) from error
                raise
            why = faults.summary(cause)
            if why != said or time.monotonic() - said_at >= _SAY_SECONDS:
                _log.warning("database_awaited", why=why, mend=faults.mend(cause))
                said, said_at = why, time.monotonic()
        else:
            return True
        try:
            async with asyncio.timeout(pause):
                await stopping.wait()
        except TimeoutError:
            pause = min(2 * pause, _MOST_PAUSE_SECONDS)
    return False


def _prepare(db: Database) -> None:
    db.check()
    db.look()
    migrate.upgrade(db.writer_engine, db.time.now_ms() // 1000)
    db.forget_marks()
