"""Room on the store's disks: what is kept back for results, so that running work can end."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from services.kit.wire.errors import UnavailableError

_LOOK_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 30
"""Room comes from people or the sweeper; the official clients wait as long as this, not minutes."""


class Disk:
    """The disks that a store writes to, looked at once a second at most."""

    def __init__(
        self,
        folders: Sequence[Path] = (),
        reserve_bytes: int = 0,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch the disks that `folders` lie on; without any there is always room.

        Args:
            folders: existing directories.
            reserve_bytes: what must be free on each of them.
            monotonic: seconds from any start.
        """
        self._folders = folders
        self._reserve = reserve_bytes
        self._monotonic = monotonic
        self._looked_at: float | None = None
        self._room = True

    async def require_room(self) -> None:
        """Refuse what takes new room: a file, a part of an upload, a batch.

        Raises:
            UnavailableError: less is free than the reserve.
        """
        now = self._monotonic()
        if self._looked_at is None or now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._room = await asyncio.to_thread(self._is_room)
        if not self._room:
            raise UnavailableError(
                f"The store has less than {self._reserve} bytes of its disk left and keeps them "
                "for the results of batches that run: it takes no new files, parts and batches. "
                "Try again once files were deleted, or ask the operator for a larger disk.",
                retry_after_seconds=_RETRY_SECONDS,
            )

    def _is_room(self) -> bool:
        if not self._reserve:
            return True
        for folder in self._folders:
            try:
                found = os.statvfs(folder)
            except OSError:
                return False
            if found.f_bavail * found.f_frsize < self._reserve:
                return False
        return True
