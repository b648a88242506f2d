"""Background loops that tests can step: `run_once` does the work, `run` only waits for it."""

import asyncio
from collections.abc import Awaitable, Callable

from services.kit.process.log import get_logger
from services.kit.wire.errors import UnavailableError

_log = get_logger(__name__)


class Loop:
    """Calls `run_once` at each tick and at once when woken, until stopped.

    A failing `run_once` is logged and tried again at the next tick: loops are level-triggered, so
    that nothing is lost by a failed turn.
    """

    def __init__(
        self, name: str, run_once: Callable[[], Awaitable[object]], *, tick_seconds: float
    ) -> None:
        """Make a loop named `name`; it does nothing until `run`."""
        self.name = name
        self._run_once = run_once
        self._tick_seconds = tick_seconds
        self._wake = asyncio.Event()
        self._stopping = False

    def wake(self) -> None:
        """Ask for a turn now; many calls before it starts are one turn."""
        self._wake.set()

    def stop(self) -> None:
        """Let `run` return after the turn in progress."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Take turns until `stop`."""
        while True:
            self._wake.clear()
            try:
                await self._run_once()
            except asyncio.CancelledError:
                raise
            except UnavailableError as error:
                # Somebody else is away, and that is told where it was noticed.
                _log.warning("loop_turn_put_off", loop=self.name, why=error.message)
            except Exception:  # noqa: BLE001 - whatever it is, the next turn tries again
                _log.exception("loop_turn_failed", loop=self.name)
            if self._stopping:
                return
            try:
                async with asyncio.timeout(self._tick_seconds):
                    await self._wake.wait()
            except TimeoutError:
                continue
