"""Whether a service can really take work: asked each second, told when it changes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

from services.kit.process.log import get_logger
from services.kit.process.loop import Loop
from services.kit.wire.errors import NightshiftError

_log = get_logger(__name__)

TICK_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 3.0
"""What is not found to be there within this time is not there."""

Look = Callable[[], Awaitable[bool | None]]
"""Returns false, or raises a `NightshiftError`, where what it looks at is not there."""


class Readiness:
    """What a service needs, and which of it is missing."""

    def __init__(
        self, looks: Mapping[str, Look], tell: Callable[[frozenset[str]], Awaitable[None]]
    ) -> None:
        """Know nothing before `run_once`.

        Args:
            looks: how each thing that is needed is looked at, by its name in the log.
            tell: called after each look with the names of what is missing.
        """
        self._looks = looks
        self._tell = tell
        self._reasons: dict[str, str] | None = None

    async def run_once(self) -> frozenset[str]:
        """Look at all, and tell; returns the names of what is missing."""
        found = await asyncio.gather(*(self._look(look) for look in self._looks.values()))
        reasons = {name: why for name, why in zip(self._looks, found, strict=True) if why}
        missing = frozenset(reasons)
        if reasons != self._reasons:
            if missing:
                _log.warning("not_ready", **reasons)
            else:
                _log.info("ready")
        self._reasons = reasons
        await self._tell(missing)
        return missing

    async def _look(self, look: Look) -> str:
        """Return why something is missing; empty where it is there."""
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                return "it is not there" if await look() is False else ""
        except TimeoutError:
            return f"no answer for {LOOK_SECONDS:.0f} s"
        except NightshiftError as error:
            return error.message

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Look each second until the block is left."""
        loop = Loop("readiness", self.run_once, tick_seconds=TICK_SECONDS)
        task = asyncio.create_task(loop.run())
        try:
            yield
        finally:
            loop.stop()
            await task
