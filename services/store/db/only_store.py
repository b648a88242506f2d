"""A data directory whose SQLite database one process at a time works on."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from services.kit.process.settings import SettingsError

DATABASE: Final = "nightshift.db"
"""The file in a data directory, where no other one is set."""
UNFINISHED: Final = "nightshift.db.unfinished"
"""A database that is being put back; renamed once all that it names is there."""


@contextlib.contextmanager
def only_store(folder: Path, *, restoring: bool = False) -> Iterator[None]:
    """Hold the lock that makes this the only one to work on the SQLite database in `folder`.

    Raises:
        SettingsError: another one does, or the directory was not filled to the end, but for
            `restoring`.
    """
    with _locked(folder / "store.lock", folder, "NIGHTSHIFT_STORE_DATA_DIR"):
        if not restoring and (folder / UNFINISHED).exists():
            raise SettingsError(
                f"a backup was being put back into {folder} and is not whole: run the same "
                "`nightshift restore` again, which goes on with it"
            )
        yield


@contextlib.contextmanager
def only_user(database: Path, data_dir: Path) -> Iterator[None]:
    """Hold the lock that makes this the only store on an SQLite file, whatever its directory.

    Raises:
        SettingsError: another store works on the file.
    """
    file = database.resolve()
    if file.parent == data_dir.resolve() and file.name == DATABASE:
        # That directory's own lock is held.
        yield
        return
    name = "store.lock" if file.name == DATABASE else f"{file.name}.lock"
    with _locked(file.with_name(name), file, "NIGHTSHIFT_STORE_DATABASE_URL"):
        yield


@contextlib.contextmanager
def _locked(path: Path, place: Path, setting: str) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SettingsError(
                f"another store works on {place}; stop it first, or give this one another {setting}"
            ) from None
        yield
