"""Lines a second through the whole system with an engine that answers at once; CPU and memory."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from benchmarks.processes import MIB, Meter, Usage, loop_speed
from benchmarks.report import Row, at_least, at_most
from benchmarks.system import System, require_completed, running, simulated_lines
from benchmarks.workshop import Workshop

NAME: Final = "pipeline"

LINES: Final = 50_000
LINE_BYTES: Final = 1_024
EXECUTORS: Final = 2
ROUNDS: Final = 3
FLOOR: Final = 5_000
BUDGET: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One batch through the pipeline. Seconds, unless said otherwise.

    Attributes:
        upload: the input's upload, index included.
        first: create to the first durable line.
        tail: all lines done to completed.
        total: create to completed.
        usage: of every process, from create to completed.
        upload_usage: of every process, during the upload.
        client_cpu: of this process, from create to completed.
        others: share of all cores that others took, 0 to 1.
        loop: thousands of rounds a second of a fixed loop, before it.
    """

    upload: float
    first: float
    tail: float
    total: float
    usage: list[Usage]
    upload_usage: list[Usage]
    client_cpu: float
    others: float
    loop: float

    @property
    def cpu(self) -> float:
        """CPU seconds of all services."""
        return sum(one.cpu_seconds for one in self.usage)


def push(system: System, data: bytes, lines: int) -> Run:
    """Send one batch through and check that each line has exactly one result."""
    loop = loop_speed()
    meter = Meter(system.pids())
    began = time.monotonic()
    file_id = system.api.upload(data)
    upload = time.monotonic() - began
    upload_usage = meter.stop()
    meter = Meter(system.pids())
    began = time.monotonic()
    batch = system.api.create(file_id)
    seen = system.api.follow(batch["id"], every_seconds=0.02)
    usage = meter.stop()
    require_completed(seen.batch)
    check_results(system.api.content(seen.batch["output_file_id"]), lines)
    return Run(
        upload=upload,
        first=seen.first_progress_at - began,
        tail=seen.ended_at - seen.all_done_at,
        total=seen.ended_at - began,
        usage=usage,
        upload_usage=upload_usage,
        client_cpu=meter.client_cpu_seconds,
        others=meter.others,
        loop=loop,
    )


def check_results(output: bytes, lines: int) -> None:
    """Insist on every line once, in input order. AssertionError otherwise."""
    ids = [json.loads(line)["custom_id"] for line in output.splitlines()]
    assert ids == [f"request-{i:07d}" for i in range(lines)], "results are not the input's lines"


def by_process(usage: list[Usage], lines: int) -> str:
    """Write CPU a line and peak memory of each process."""
    return ", ".join(
        f"{one.name} {one.cpu_seconds / lines * 1e6:.1f} µs {one.peak_mib:.0f} MiB"
        for one in sorted(usage, key=lambda one: -one.cpu_seconds)
    )


def measure(workshop: Workshop) -> Iterator[Row]:
    """Run the same batch `ROUNDS` times through one system."""
    data = simulated_lines(LINES, size_bytes=LINE_BYTES)
    runs = []
    with running(("--engine", "simulated", "--executors", str(EXECUTORS))) as system:
        system.wait_serving(simulated_lines(2_000, size_bytes=LINE_BYTES), 60)
        for number in range(ROUNDS):
            run = push(system, data, LINES)
            runs.append(run)
            workshop.say(
                f"round {number + 1}: upload {run.upload:.2f} s, "
                f"create to completed {run.total:.2f} s = {LINES / run.total:,.0f} lines/s, "
                f"{run.cpu / LINES * 1e6:.0f} µs CPU a line, others {run.others:.0%}, "
                f"loop {run.loop:,.0f} k/s"
            )
    yield from _rows(runs, len(data))


def _rows(runs: list[Run], size: int) -> Iterator[Row]:
    middle = sorted(runs, key=lambda run: run.total)[len(runs) // 2]
    yield at_least(
        NAME,
        f"lines/s, {LINES:,} lines of 1 KiB, {EXECUTORS} executors",
        median(LINES / run.total for run in runs),
        BUDGET,
        also=f"floor {FLOOR:,}",
        unit="lines/s",
        detail=", ".join(f"{LINES / run.total:,.0f}" for run in runs)
        + f"; others took {', '.join(f'{run.others:.0%}' for run in runs)} of the cores, "
        f"loop {', '.join(f'{run.loop:,.0f}' for run in runs)} k/s",
    )
    yield at_most(
        NAME,
        "CPU a line, all processes",
        median(run.cpu for run in runs) / LINES * 1e6,
        60,
        unit="µs",
        detail=by_process(middle.usage, LINES)
        + f"; this client {middle.client_cpu / LINES * 1e6:.1f} µs",
    )
    upload = sorted(runs, key=lambda run: run.upload)[len(runs) // 2]
    yield at_least(
        NAME,
        "upload with index",
        size / 1e6 / upload.upload,
        100,
        unit="MB/s",
        detail="CPU of it: " + by_process(upload.upload_usage, LINES),
    )
    yield _peaks(runs)
    yield at_most(
        NAME,
        "create to first durable line",
        median(run.first for run in runs) * 1e3,
        500,
        unit="ms",
        detail="an upper bound: a result is seen when its frame is stored",
    )
    yield at_most(
        NAME,
        "last line done to completed",
        median(run.tail for run in runs) * 1e3,
        300,
        unit="ms",
        detail="polled every 20 ms",
    )


def _peaks(runs: list[Run]) -> Row:
    peaks: dict[str, float] = {}
    for run in runs:
        for one in (*run.usage, *run.upload_usage):
            peaks[one.name] = max(peaks.get(one.name, 0.0), one.peak_mib)
    highest: Any = max(peaks, key=lambda name: peaks[name])
    return Row(
        bench=NAME,
        what=f"peak memory of one process ({highest})",
        value=peaks[highest],
        unit="MiB",
        detail=", ".join(f"{name} {peak:.0f}" for name, peak in sorted(peaks.items()))
        + f"; the input has {LINES * LINE_BYTES / MIB:.0f} MiB",
    )
