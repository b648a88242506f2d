"""A folder for copies of rows, which a command that was killed leaves only until the next one.

Rows hold users' answers and signing secrets, so that no copy may lie about in the temporary folder.
SQLite works on names, so that it cannot be a file without one; instead each folder is held by an
`flock` on it, which ends with its process however that ends, and whoever begins removes those that
nobody holds.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_TRIES: Final = 100
"""A folder is made and held in two steps, between which another command may take it as left."""

PREFIX: Final = "nightshift-rows-"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Make a folder that only its owner can read, and remove it in the end.

    Raises:
        OSError: it cannot be made.
    """
    made, held = _make()
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(held)


def clear() -> None:
    """Remove the folders of commands of this user that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        held = _hold(left)
        if held is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(held)


def _make() -> tuple[Path, int]:
    for _ in range(_TRIES):
        made = Path(tempfile.mkdtemp(prefix=PREFIX))
        held = _hold(made)
        if held is not None:
            return made, held
    raise OSError(f"each folder in {tempfile.gettempdir()} is gone as soon as it is made")


def _hold(found: Path) -> int | None:
    """Return a descriptor that holds it; None where another process does, or it is not ours."""
    try:
        descriptor = os.open(found, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it before may have removed it.
        opened, named = os.fstat(descriptor), found.lstat()
        if opened.st_uid == os.geteuid() and os.path.samestat(opened, named):
            return descriptor
    except OSError:
        # It is held, or gone.
        pass
    os.close(descriptor)
    return None
