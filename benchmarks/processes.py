"""What processes took between two moments: CPU seconds and peak memory, at no cost meanwhile.

The kernel keeps both; nothing samples while a benchmark runs.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one process, with its children, took.

    Attributes:
        name: `store`, `executor-0`, …
        cpu_seconds: user and system time.
        peak_mib: the most resident memory; with children the sum of each one's peak.
    """

    name: str
    cpu_seconds: float
    peak_mib: float


class Meter:
    """Measures named processes of ours from its making to `stop`."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """Start measuring; peaks are counted anew from here on.

        Args:
            pids: name → process; a name that starts with `executor` stands for its children too.
        """
        self._processes = {name: _with_children(name, pid) for name, pid in pids.items()}
        for processes in self._processes.values():
            for process in processes:
                _reset_peak(process.pid)
        self._cpu = {name: _cpu(processes) for name, processes in self._processes.items()}
        self._own = _cpu([psutil.Process()])
        self._machine = _machine_busy()
        self._began = time.monotonic()
        self.seconds = 0.0
        """How long it measured; known once stopped."""
        self.client_cpu_seconds = 0.0
        """What this process took itself; known once stopped."""
        self.others = 0.0
        """Share of all cores that went to processes not measured, 0 to 1; known once stopped."""

    def stop(self) -> list[Usage]:
        """Return what each took."""
        used = [
            Usage(
                name=name,
                cpu_seconds=_cpu(processes) - self._cpu[name],
                peak_mib=sum(_peak(process.pid) for process in processes) / MIB,
            )
            for name, processes in self._processes.items()
        ]
        self.seconds = time.monotonic() - self._began
        self.client_cpu_seconds = _cpu([psutil.Process()]) - self._own
        ours = sum(one.cpu_seconds for one in used) + self.client_cpu_seconds
        rest = _machine_busy() - self._machine - ours
        self.others = max(rest, 0.0) / (self.seconds * (os.cpu_count() or 1))
        return used


def _with_children(name: str, pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    if not name.startswith("executor"):
        return [process]
    return [process, *process.children(recursive=True)]


def _cpu(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _machine_busy() -> float:
    times = psutil.cpu_times()
    waiting = times.idle + getattr(times, "iowait", 0.0)
    # Guests are counted in user time already.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - guests - waiting)


def _reset_peak(pid: int) -> None:
    # 5 resets the kernel's high water mark of resident memory (proc(5)).
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peak(pid: int) -> int:
    return _status_bytes(pid, "VmHWM:")


def resident_mib(pid: int) -> float:
    """Return a process' resident memory now."""
    return _status_bytes(pid, "VmRSS:") / MIB


def _status_bytes(pid: int, field: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def has_mapped(pid: int, word: str) -> bool:
    """Tell whether a process has a file whose path contains `word` in its memory."""
    return word in Path(f"/proc/{pid}/maps").read_text()


def loop_speed() -> float:
    """Return thousands of rounds a second of a fixed Python loop: this machine's speed now."""
    rounds = 200_000
    best = 0.0
    for _ in range(3):
        total, began = 0, time.perf_counter()
        for i in range(rounds):
            total += i & 7
        best = max(best, rounds / (time.perf_counter() - began) / 1_000)
    return best


def describe_machine() -> str:
    """Say what all figures were measured on, in one line."""
    return (
        f"{os.cpu_count()} cores (shared with whatever else runs), "
        f"{psutil.virtual_memory().total / 1024**3:.0f} GiB memory, "
        f"Python loop {loop_speed():,.0f} k/s, load {os.getloadavg()[0]:.1f}"
    )
