"""A data directory whose SQLite database one process at a time works on."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from services.kit.settings import SettingsError

UNFINISHED: Final = "nightshift.db.unfinished"
"""A database that is being put back; renamed once all that it names is there."""


@contextlib.contextmanager
def only_store(folder: Path, *, restoring: bool = False) -> Iterator[None]:
    """Hold the lock that makes this the only one to work on the SQLite database in `folder`.

    Raises:
        SettingsError: another one does, or the directory was not filled to the end, but for
            `restoring`.
    """
    with (folder / "store.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SettingsError(
                f"another store works on {folder}; stop it first, or give this one another "
                "NIGHTSHIFT_STORE_DATA_DIR"
            ) from None
        if not restoring and (folder / UNFINISHED).exists():
            raise SettingsError(
                f"a backup was being put back into {folder} and is not whole: run the same "
                "`nightshift restore` again, which goes on with it"
            )
        yield
