"""Ends what a `nightshift up` that is gone left running."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Final

import psutil

from services.cli.shared.datadir import OWNER_VARIABLE, DataDir

LEFTOVER_SECONDS: Final = 3.0
"""What the children of a killed `up` get to end by themselves."""


def end_leftovers(data: DataDir, seconds: float = LEFTOVER_SECONDS) -> list[str]:
    """End all children of an `up` on this directory, with all that they started themselves.

    They are known by their environment: `up` may have died before it wrote their pid files.
    Call it only while no `up` works in the directory. Returns the names of what ran.
    """
    groups = data.pids()
    running = list(_members(data, groups))
    for process, _ in running:
        with contextlib.suppress(psutil.Error):
            # Only leaders: an engine that hears it too would end under its executor's hands.
            if process.pid == os.getpgid(process.pid):
                process.send_signal(signal.SIGTERM)
    psutil.wait_procs([process for process, _ in running], timeout=seconds)
    killed = list(_members(data, groups))
    for process, _ in killed:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs([process for process, _ in killed], timeout=seconds)
    for name in groups.values():
        data.remove_pid(name)
    return sorted({name for _, name in running})


def _members(data: DataDir, groups: Mapping[int, str]) -> Iterator[tuple[psutil.Process, str]]:
    """Yield the live processes, each with its child's name where a pid file says it.

    A group's number alone could be a stranger's: numbers start anew with the machine.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if (
                process.pid != os.getpid()
                and process.environ().get(OWNER_VARIABLE) == str(data.root)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                yield process, groups.get(os.getpgid(process.pid), process.name())
