"""Keeps child processes running: starts each again when it ends, until told to stop."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.cli.shared.datadir import DataDir, DataDirError
from services.kit.process.log import get_logger

_log = get_logger(__name__)

RESTART_SECONDS: Final = 0.05
"""Pause before a child that had run is started again."""
LONGEST_RESTART_SECONDS: Final = 5.0
SHORT_LIFE_SECONDS: Final = 1.0
"""A child that ends within this time of its start is started again ever more slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One child process.

    Attributes:
        name: of its pid file and in logs.
        command: program and arguments.
        environment: all of it.
        cwd: its working directory; None keeps ours.
        stop_seconds: what it gets to end by itself after SIGTERM.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: Path | None = None
    stop_seconds: float = 15.0


def next_delay(previous: float, lived_seconds: float) -> float:
    """Return the pause before the next start: short, growing only for a child that cannot live."""
    if lived_seconds >= SHORT_LIFE_SECONDS:
        return RESTART_SECONDS
    return min(max(previous * 2, RESTART_SECONDS), LONGEST_RESTART_SECONDS)


class Child:
    """A child that is kept running, in a process group of its own."""

    def __init__(self, spec: ChildSpec, data: DataDir) -> None:
        """Describe it; `start` runs it."""
        self.spec = spec
        self.exit_code: int | None = None
        """How it last ended; None before that."""
        self._data = data
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._started = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it, and from now on again whenever it ends; returns once it was tried."""
        self._task = asyncio.create_task(self._keep(), name=f"keep-{self.spec.name}")
        await self._started.wait()

    async def stop(self, hurry: asyncio.Event) -> None:
        """End it: SIGTERM, then SIGKILL after its `stop_seconds`, or at once on `hurry`."""
        self._stopping.set()
        task = self._task
        if task is None:
            return
        process = self._process
        if process is not None:
            # Not the group: an engine that hears it too would end under its executor's hands.
            _signal(process.pid, signal.SIGTERM)
            hurried = asyncio.create_task(hurry.wait())
            await asyncio.wait(
                (task, hurried),
                timeout=self.spec.stop_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            hurried.cancel()
            if not task.done():
                _log.warning("child_killed", child=self.spec.name)
                _signal_group(process.pid, signal.SIGKILL)
        await task

    async def _keep(self) -> None:
        delay = 0.0
        while not self._stopping.is_set():
            began = time.monotonic()
            await self._run_once()
            self._started.set()
            if self._stopping.is_set():
                break
            lived = time.monotonic() - began
            delay = next_delay(delay, lived)
            _log.warning(
                "child_ended",
                child=self.spec.name,
                exit_code=self.exit_code,
                lived_seconds=round(lived, 3),
                again_in_seconds=delay,
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()

    async def _run_once(self) -> None:
        """Run it to its end; leave neither its own children nor its pid file."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                env=dict(self.spec.environment),
                cwd=self.spec.cwd,
                stdin=asyncio.subprocess.DEVNULL,
                # Standard output is ours alone: what a library prints there goes to the logs.
                stdout=sys.stderr.fileno(),
                process_group=0,
            )
        except OSError as error:
            _log.error("child_not_started", child=self.spec.name, error=str(error))
            return
        self._process = process
        try:
            self._data.write_pid(self.spec.name, process.pid)
        except DataDirError as error:
            # A full disk must not leave a child that nobody waits for.
            _log.error("pid_not_written", child=self.spec.name, error=str(error))
        self._started.set()
        if self._stopping.is_set():
            # Told to stop while it was being made: it has nothing to finish.
            _signal_group(process.pid, signal.SIGKILL)
        _log.info("child_started", child=self.spec.name, pid=process.pid)
        self.exit_code = await process.wait()
        self._process = None
        # An engine's processes hold GPU memory that the next start needs.
        _signal_group(process.pid, signal.SIGKILL)
        try:
            self._data.remove_pid(self.spec.name)
        except OSError as error:
            # Nor may a disk that failed end what starts it again.
            _log.error("pid_not_removed", child=self.spec.name, error=str(error))


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
