"""A disk that loses what was not synced, under a real process; `power_cut.c` is the half in it.

disk = PowerCut(folder)                     # what lies below `folder` now is on disk
store = StoreProcess(disk.root / "data", disk.environment())
...
store.kill()
disk.cut()                                  # now only what was synced lies there
"""

import atexit
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).with_suffix(".c")
_NEVER_SYNCED: Final = ("-shm",)
"""Ends of names of what SQLite maps into memory and makes anew."""


@dataclass(frozen=True, slots=True)
class Event:
    """A sync, or a rename to `to`. Times are nanoseconds of `time.monotonic_ns`."""

    kind: str
    began_ns: int
    ended_ns: int
    path: Path
    to: Path | None = None


class PowerCut:
    """Everything below one directory."""

    def __init__(self, folder: Path) -> None:
        """Watch `folder / "disk"`, which is made; all else that is needed lies beside it."""
        self.root = folder / "disk"
        self._shadow = folder / "shadow"
        self._log = folder / "syncs.log"
        self._library = library()
        self.root.mkdir(parents=True)
        self._begin()

    def environment(self, *, delay_ms: int = 0, ignore: str = "") -> dict[str, str]:
        """What a process is started with.

        Args:
            delay_ms: how long each sync takes at least.
            ignore: paths that contain this are never on disk, whatever is synced.
        """
        return {
            "LD_PRELOAD": str(self._library),
            "POWER_CUT_ROOT": str(self.root),
            "POWER_CUT_SHADOW": str(self._shadow),
            "POWER_CUT_LOG": str(self._log),
            "POWER_CUT_DELAY_MS": str(delay_ms),
            "POWER_CUT_IGNORE": ignore,
        }

    def events(self) -> list[Event]:
        """What was synced and renamed so far, in order."""
        found = []
        for line in self._log.read_text().splitlines() if self._log.exists() else ():
            kind, began, ended, path, *more = line.split(" ")
            to = Path(more[0]) if more else None
            found.append(Event(kind, int(began), int(ended), Path(path), to))
        return found

    def cut(self) -> None:
        """Leave below the root what was synced; no watched process may run."""
        kept = self._shadow.parent / "kept"
        kept.mkdir()
        self._restore(self.root.stat().st_ino, kept)
        shutil.rmtree(self.root)
        shutil.rmtree(self._shadow)
        kept.rename(self.root)
        self._begin()

    def _begin(self) -> None:
        """Take what lies below the root for synced."""
        for kind in ("inodes", "entries", "graves"):
            (self._shadow / kind).mkdir(parents=True)
        for directory in (self.root, *(path for path in self.root.rglob("*") if path.is_dir())):
            lines = []
            for path in directory.iterdir():
                inode = path.lstat().st_ino
                lines.append(f"{inode} {'d' if path.is_dir() else 'f'} {path.name}\n")
                if path.is_file():
                    shutil.copyfile(path, self._shadow / "inodes" / str(inode))
            listing = self._shadow / "entries" / str(directory.stat().st_ino)
            listing.write_text("".join(lines))

    def _restore(self, inode: int, to: Path) -> None:
        listing = self._shadow / "entries" / str(inode)
        for line in listing.read_text().splitlines() if listing.exists() else ():
            number, kind, name = line.split(" ", 2)
            if name.endswith(_NEVER_SYNCED):
                continue
            if kind == "d":
                (to / name).mkdir()
                self._restore(int(number), to / name)
                continue
            # It has a name; what was in it may never have come to the disk.
            (to / name).touch(mode=0o600)
            content = self._shadow / "inodes" / number
            if content.exists():
                shutil.copyfile(content, to / name)


@cache
def library() -> Path:
    """Build the half that goes into the process, once.

    Raises:
        RuntimeError: there is no C compiler, or it fails.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("these tests need a C compiler (cc or gcc); none of them is skipped")
    folder = tempfile.mkdtemp(prefix="nightshift-power-cut-")
    atexit.register(shutil.rmtree, folder)
    built = Path(folder) / "power_cut.so"
    done = subprocess.run(
        [
            *(compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1"),
            *("-o", str(built), str(_SOURCE), "-ldl", "-lpthread"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{_SOURCE.name} does not build: {done.stderr}")
    return built
