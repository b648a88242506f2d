"""A real disk that is full when a test wants it to be: a small tmpfs. Mounting takes root."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1024 * 1024


@dataclass(frozen=True)
class SmallDisk:
    """A mounted disk, with a folder for the store and one that takes its room."""

    root: Path

    @property
    def data(self) -> Path:
        """Return the store's directory."""
        return self.root / "data"

    def fill(self, *, but: int = 0) -> None:
        """Take all room, all but `but` bytes of it."""
        with (self.root / "filler").open("ab", buffering=0) as filler:
            for size in (MIB, 4096):
                with contextlib.suppress(NoRoomError):
                    while True:
                        _write(filler.fileno(), size)
            filler.truncate(max(0, filler.tell() - but))

    def free(self) -> None:
        """Give the room back."""
        (self.root / "filler").unlink()

    def read_only(self, wanted: bool) -> None:
        """Refuse to write, or take it back."""
        option = f"remount,{'ro' if wanted else 'rw'}"
        subprocess.run(["mount", "-o", option, str(self.root)], check=True)

    def used(self) -> int:
        """Return the bytes of all files that are not ours."""
        files = (path for path in self.data.rglob("*") if path.is_file())
        return sum(path.stat().st_blocks * 512 for path in files)


class NoRoomError(Exception):
    """The disk is full."""


def _write(descriptor: int, size: int) -> None:
    try:
        os.write(descriptor, bytes(size))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise NoRoomError from None


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[SmallDisk]:
    """Mount a disk of `size` bytes on `folder`, which is made.

    Raises:
        AssertionError: mounting is not allowed here; tests need root, as in a container of CI.
    """
    folder.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"run the tests as root: a disk is mounted here: {done.stderr}"
    try:
        yield SmallDisk(folder)
    finally:
        # Lazily: what a process that is being killed still has open must not fail the test.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
