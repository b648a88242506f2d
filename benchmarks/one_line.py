"""Latency of a batch of one line, created to completed, with an engine that answers at once."""

import time
from collections.abc import Iterator
from typing import Final

from benchmarks.processes import Meter
from benchmarks.report import Row, at_most, percentile
from benchmarks.system import require_completed, running, simulated_lines
from benchmarks.workshop import Workshop

NAME: Final = "one_line"

TIMES: Final = 200
_POLL_SECONDS: Final = 0.002


def measure(workshop: Workshop) -> Iterator[Row]:
    """Run `TIMES` batches one after the other on a quiet system."""
    line = simulated_lines(1)
    with running() as system:
        system.wait_serving(simulated_lines(64), 60)
        file_id = system.api.upload(line)
        times: list[float] = []
        polls = 0
        meter = Meter(system.pids())
        for number in range(20 + TIMES):
            if number == 20:
                meter, times, polls = Meter(system.pids()), [], 0
            began = time.monotonic()
            batch = system.api.create(file_id)
            while batch["status"] not in ("completed", "failed"):
                time.sleep(_POLL_SECONDS)
                batch = system.api.batch(batch["id"])
                polls += 1
            times.append((time.monotonic() - began) * 1e3)
            require_completed(batch)
        usage = meter.stop()
    cpu = ", ".join(
        f"{one.name} {one.cpu_seconds / TIMES * 1e3:.1f}"
        for one in sorted(usage, key=lambda one: -one.cpu_seconds)
    )
    workshop.say(f"p50 {percentile(times, 50):.1f} ms, p99 {percentile(times, 99):.1f} ms")
    yield at_most(
        NAME,
        f"create to completed, p50 of {TIMES}",
        percentile(times, 50),
        25,
        unit="ms",
        detail=f"best {min(times):.1f}, p90 {percentile(times, 90):.1f}, worst {max(times):.1f}; "
        f"{polls / TIMES:.0f} polls each; others took {meter.others:.0%} of the cores",
    )
    yield at_most(
        NAME,
        "create to completed, p99",
        percentile(times, 99),
        100,
        unit="ms",
        detail=f"CPU ms a batch, polls included: {cpu}",
    )
