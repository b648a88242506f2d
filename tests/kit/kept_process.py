"""A service that is kept running, as whatever operates it would, and hit by faults meanwhile."""

import asyncio
import contextlib
import signal
import subprocess
from typing import Final

from tests.kit.backings import freeze
from tests.kit.service_processes import ServiceProcess

RESTART_SECONDS: Final = 0.3
"""Pause before a service that ended by itself is started again."""


BY_SIGNAL: Final = (-signal.SIGKILL, -signal.SIGTERM)
"""How one ends that another fault hits meanwhile, or that has only just begun to start."""


class KeptProcess:
    """A service's process: whenever it ends without being asked to, it is started again."""

    def __init__(self, process: ServiceProcess) -> None:
        """Take a process that does not run; nothing runs before `start`."""
        self._process = process
        self.endings: list[int] = []
        """Exit statuses of the times that it ended by itself."""
        self._keeper: asyncio.Task[None] | None = None
        # One hit at a time: what is killed must be back before it is killed again.
        self._hit = asyncio.Lock()

    @property
    def pid(self) -> int:
        """Its process id; of the last process while it is away."""
        return self._process.pid

    def start(self) -> None:
        """Start it, and again whenever it ends by itself."""
        self._process.start()
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self._process.name}")

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(RESTART_SECONDS)
            status = self._status()
            if status is not None and not self._hit.locked():
                self.endings.append(status)
                self._process.start()

    def _status(self) -> int | None:
        return None if self._process.process is None else self._process.process.poll()

    async def kill(self, away_seconds: float) -> None:
        """SIGKILL it, and start it again after a while."""
        async with self._hit:
            await self._end(signal.SIGKILL)
            await asyncio.sleep(away_seconds)
            self._process.start()

    async def restart(self) -> None:
        """SIGTERM it, and start it again when it has drained. AssertionError where it does not."""
        async with self._hit:
            status = await self._end(signal.SIGTERM)
            self._process.start()
        assert status in (0, *BY_SIGNAL), f"ended with {status}:\n{self.log_end()}"

    async def freeze(self, seconds: float) -> None:
        """SIGSTOP it for a while. Another fault may end it meanwhile."""
        await freeze(self.pid, seconds)

    async def stop(self) -> int:
        """SIGTERM it for good; returns its exit status."""
        self._leave()
        async with self._hit:
            return await self._end(signal.SIGTERM)

    def end(self) -> None:
        """SIGKILL it for good, from wherever it is."""
        self._leave()
        if self._status() is None and self._process.process is not None:
            self._process.process.kill()
            self._process.process.wait()

    def log_end(self, size: int = 6_000) -> str:
        """Return the end of what it logged."""
        return self._process.log(size)

    def _leave(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()

    async def _end(self, number: signal.Signals) -> int:
        if self._status() is None:
            self._process.send(number)
            # What is stopped cannot end in order.
            self._process.send(signal.SIGCONT)
        try:
            return await self._process.ended()
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                self._process.send(signal.SIGKILL)
            await self._process.ended()
            raise AssertionError(f"{self._process.name} did not end:\n{self.log_end()}") from None
