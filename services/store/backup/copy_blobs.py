"""Blobs from one place to another, several at once, each whole and synced before it is named."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.kit.process import failpoints
from services.kit.wire.errors import NightshiftError
from services.store.blobs.base import BlobMissingError, Blobs, BlobUnreadableError
from services.store.blobs.reader import BlobReader, FolderReader, is_name

_AT_ONCE: Final = 8
_PIECE_BYTES: Final = 1024 * 1024
_TELL_SECONDS: Final = 0.5

Told = Callable[[int, int], None]


class CopyError(Exception):
    """A blob cannot be copied; the message says which and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What came of it.

    Attributes:
        blobs: how many are there now, of `bytes` in all.
        kept: of these blobs, those that were there already.
        missing: names of those that are not there.
    """

    blobs: int
    bytes: int
    kept: int
    missing: tuple[str, ...] = ()


class Copier:
    """Copies blobs by name."""

    def __init__(
        self, step: str, source: BlobReader, target: Blobs, present: BlobReader | None, told: Told
    ) -> None:
        """Copy from `source` to `target`.

        Args:
            step: what writing one is called among the failpoints.
            source: where they are.
            target: where they go.
            present: reads the target, where some may be there already; None where it was empty.
            told: called now and then with the blobs and bytes so far.
        """
        self._step = step
        self._source = source
        self._target = target
        self._present = present
        self._told = told
        self._told_at = 0.0
        self._blobs = 0
        self._bytes = 0
        self._kept = 0
        self._missing: list[str] = []
        self._may_lack: Container[str] | None = None
        self._older: FolderReader | None = None
        self._link: Callable[[str], None] = lambda _name: None

    def reuse(self, older: Path, folder: Path) -> None:
        """Take what stands in `older` too, a folder of blobs, as links in the target's `folder`."""
        self._older = FolderReader(older)
        self._link = lambda name: _link(older / name, folder / name)

    async def copy(self, names: Iterator[str], may_lack: Container[str] | None = ()) -> Copied:
        """Copy all of these.

        Args:
            names: of the blobs.
            may_lack: those that may be gone; None stands for any.

        Raises:
            CopyError: one is gone or not as long as its place says.
            UnavailableError: one cannot be read or written now.
        """
        self._may_lack = may_lack
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(self._copy_some(names))
        except BaseExceptionGroup as errors:
            # Not by `except*`: what is raised there comes wrapped in a group on Python 3.11.2.
            ours = errors.subgroup((CopyError, NightshiftError))
            if ours is None:
                raise
            # The others were cancelled, or met the same.
            raise ours.exceptions[0] from None
        self._told(self._blobs, self._bytes)
        missing = tuple(sorted(self._missing))
        return Copied(blobs=self._blobs, bytes=self._bytes, kept=self._kept, missing=missing)

    async def _copy_some(self, names: Iterator[str]) -> None:
        # All tasks draw from the same names.
        for name in names:
            await self._copy_one(name)
            if time.monotonic() - self._told_at > _TELL_SECONDS:
                self._told_at = time.monotonic()
                self._told(self._blobs, self._bytes)

    async def _copy_one(self, name: str) -> None:
        if not is_name(name):
            raise CopyError(f"a row of blobs is called {name!r}: `nightshift doctor --check`")
        found = await asyncio.to_thread(self._find, name)
        if found is None:
            self._lacks(name)
            return
        reader, size = found
        if await asyncio.to_thread(self._is_there, name, size):
            self._kept += 1
        else:
            try:
                content = _content(reader, name, size)
                written = await self._target.put(self._step, name, content)
            except BlobMissingError:
                self._lacks(name)
                return
            except BlobUnreadableError as error:
                raise CopyError(
                    f"blobs/{name} cannot be read: {error.why}. Try again; where its disk never "
                    "gives it back, move it away, so that it counts as lost"
                ) from error
            if written != size:
                raise CopyError(f"blobs/{name} has {written} bytes instead of {size}")
        self._blobs += 1
        self._bytes += size

    def _find(self, name: str) -> tuple[BlobReader, int] | None:
        """Where a blob is longest, and its size: the source may have lost it, or its end, since."""
        found: tuple[BlobReader, int] | None = None
        for reader in (self._source, self._present, self._older):
            size = None if reader is None else reader.size(name)
            if reader is not None and size is not None and (found is None or size > found[1]):
                found = reader, size
        return found

    def _lacks(self, name: str) -> None:
        if self._may_lack is not None and name not in self._may_lack:
            raise CopyError(
                f"blobs/{name} is gone, though its row says that it is there: `nightshift doctor "
                "--check` says whose it is and what to do"
            )
        self._missing.append(name)

    def _is_there(self, name: str, size: int) -> bool:
        """Whether the target has it already, or has now, as a link."""
        if self._present is not None and self._present.size(name) == size:
            return True
        if self._older is None or self._older.size(name) != size:
            return False
        failpoints.before(self._step)
        try:
            self._link(name)
        except OSError:
            # On another file system, or as often linked as this one allows.
            return False
        failpoints.after(self._step)
        return True


async def _content(reader: BlobReader, name: str, size: int) -> AsyncIterator[bytes]:
    for offset in range(0, size, _PIECE_BYTES):
        yield await asyncio.to_thread(reader.read, name, offset, _PIECE_BYTES)


def _link(older: Path, newer: Path) -> None:
    newer.parent.mkdir(parents=True, exist_ok=True)
    newer.unlink(missing_ok=True)
    newer.hardlink_to(older)
