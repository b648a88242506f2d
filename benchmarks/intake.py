"""A batch's way in: upload with indexing against plain copying, and create to `in_progress`."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.pipeline import LINE_BYTES
from benchmarks.processes import Meter, loop_speed
from benchmarks.report import Row, at_least, at_most
from benchmarks.system import Refused, System, require_completed, running, simulated_lines
from benchmarks.workshop import Workshop

NAME: Final = "intake"

UPLOAD_LINES: Final = 100_000
PAIRS: Final = 5
UPLOAD_BUDGET: Final = 100
BATCH_LINES: Final = 50_000
TIMES: Final = 5
START_BUDGET_MS: Final = 500

_LIMITS: Final = {"NIGHTSHIFT_STORE_MAX_BATCH_LINES": str(UPLOAD_LINES)}
_POLL_SECONDS: Final = 0.005
_COPY_BYTES: Final = 1024 * 1024
_PAIRS_SECONDS: Final = 60.0
_START_SECONDS: Final = 10.0
_RUN_SECONDS: Final = 30.0


def measure(workshop: Workshop) -> Iterator[Row]:
    """Measure uploads first, then starts, in one system."""
    with running(environment=_LIMITS) as system:
        system.wait_serving(simulated_lines(2_000, size_bytes=LINE_BYTES), 60)
        yield from _measure_uploads(workshop, system)
        yield from _measure_starts(workshop, system)


def _measure_uploads(workshop: Workshop, system: System) -> Iterator[Row]:
    data = simulated_lines(UPLOAD_LINES, size_bytes=LINE_BYTES)
    loop = loop_speed()
    meter = Meter(system.pids())
    pairs = _take_pairs(workshop, system, data)
    usage = meter.stop()
    # One more of each came first.
    cpu = ", ".join(
        f"{one.name} {one.cpu_seconds / (PAIRS + 1) / len(data) * 1e9:.1f}"
        for one in usage
        if one.name in ("gateway", "store")
    )
    yield at_least(
        NAME,
        f"upload with index, {len(data) / 1e6:.0f} MB of 1 KiB lines, median of {PAIRS}",
        median(upload for upload, _ in pairs),
        UPLOAD_BUDGET,
        unit="MB/s",
        detail=", ".join(f"{upload:.0f}" for upload, _ in pairs)
        + f"; CPU ms a MB: {cpu}; others took {meter.others:.0%} of the cores, "
        f"loop {loop:,.0f} k/s",
    )
    yield Row(
        bench=NAME,
        what=f"the same ÷ plain copying to disk with fsync, median of {PAIRS} pairs",
        value=median(upload / plain for upload, plain in pairs),
        detail="; ".join(f"{a:.0f}/{b:.0f} = {a / b:.2f}" for a, b in pairs),
    )


def _take_pairs(workshop: Workshop, system: System, data: bytes) -> list[tuple[float, float]]:
    """Upload and copy in turn, the first of each pair alternating; return both in MB/s."""
    # Beside the data directory: the same disk.
    copy = system.up.data.parent / "copy"
    system.api.upload(data)
    _copy(data, copy)
    pairs = []
    deadline = time.monotonic() + _PAIRS_SECONDS
    for number in range(PAIRS):
        rates = {}
        for side in ("copy", "upload") if number % 2 == 0 else ("upload", "copy"):
            began = time.monotonic()
            if side == "copy":
                _copy(data, copy)
            else:
                system.api.upload(data)
            rates[side] = len(data) / 1e6 / (time.monotonic() - began)
        pairs.append((rates["upload"], rates["copy"]))
        workshop.say(
            f"pair {number + 1}: upload {rates['upload']:.0f}, copy {rates['copy']:.0f} MB/s"
        )
        if time.monotonic() > deadline:
            raise Refused(f"{number + 1} pairs took {_PAIRS_SECONDS:.0f} s")
    copy.unlink()
    return pairs


def _copy(data: bytes, to: Path) -> None:
    """Write the bytes to a new file in pieces, and wait until the disk has them."""
    to.unlink(missing_ok=True)
    view = memoryview(data)
    with to.open("xb", buffering=0) as file:
        for at in range(0, len(data), _COPY_BYTES):
            file.write(view[at : at + _COPY_BYTES])
        os.fsync(file.fileno())


def _measure_starts(workshop: Workshop, system: System) -> Iterator[Row]:
    """Each time with a file of its own, just uploaded, on a system that does nothing else."""
    data = simulated_lines(BATCH_LINES, size_bytes=LINE_BYTES)
    times = []
    meter = Meter(system.pids())
    for _ in range(TIMES):
        file_id = system.api.upload(data)
        began = time.monotonic()
        batch = system.api.create(file_id)
        while batch["status"] == "validating":
            if time.monotonic() > began + _START_SECONDS:
                raise Refused(f"still validating after {_START_SECONDS:.0f} s: {batch}")
            time.sleep(_POLL_SECONDS)
            batch = system.api.batch(batch["id"])
        times.append((time.monotonic() - began) * 1e3)
        if batch["status"] != "in_progress":
            raise Refused(f"never seen in progress: {batch}")
        seen = system.api.follow(batch["id"], every_seconds=0.05, within_seconds=_RUN_SECONDS)
        require_completed(seen.batch)
    meter.stop()
    workshop.say(f"create to in_progress {', '.join(f'{one:.0f}' for one in times)} ms")
    yield at_most(
        NAME,
        f"create to `in_progress`, {BATCH_LINES:,} lines, worst of {TIMES}",
        max(times),
        START_BUDGET_MS,
        unit="ms",
        detail=f"{', '.join(f'{one:.0f}' for one in times)}; polled every "
        f"{_POLL_SECONDS * 1e3:.0f} ms; others took {meter.others:.0%} of the cores",
    )
    yield Row(
        bench=NAME,
        what="the same, median",
        value=median(times),
        unit="ms",
    )
