"""Folders whose own names are on disk, so that a power cut takes nothing that lies in them."""

import contextlib
import os
from pathlib import Path


def make(folder: Path) -> None:
    """Make a folder and those above it, synced; also where it exists.

    Who made it may have died before its name was on disk, or have been another program.

    Raises:
        OSError: it cannot be made or synced.
    """
    missing = [each for each in folder.absolute().parents if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in (*missing, folder.absolute()):
        # A folder that we may enter and not read is the operator's to keep.
        with contextlib.suppress(PermissionError):
            sync(made.parent)


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on disk.

    Raises:
        OSError: it cannot be opened or synced.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
