"""Ten times the lines: time and memory, in one system."""

from collections.abc import Iterator
from typing import Final

from benchmarks.pipeline import EXECUTORS, LINE_BYTES, Run, push
from benchmarks.processes import Usage
from benchmarks.report import Row, at_most
from benchmarks.system import running, simulated_lines
from benchmarks.workshop import Workshop

NAME: Final = "growth"

SMALL: Final = 50_000
LARGE: Final = 500_000
_LIMITS: Final = {
    "NIGHTSHIFT_STORE_MAX_BATCH_LINES": str(LARGE),
    "NIGHTSHIFT_STORE_MAX_BATCH_FILE_BYTES": str(1024**3),
    "NIGHTSHIFT_STORE_MAX_FILE_BYTES": str(1024**3),
}


def measure(workshop: Workshop) -> Iterator[Row]:
    """Run the small batch before and after the large one, so that a slow moment shows."""
    arguments = ("--engine", "simulated", "--executors", str(EXECUTORS))
    with running(arguments, _LIMITS) as system:
        system.wait_serving(simulated_lines(2_000, size_bytes=LINE_BYTES), 60)
        runs: list[Run] = []
        for lines in (SMALL, LARGE, SMALL):
            run = push(system, simulated_lines(lines, size_bytes=LINE_BYTES), lines)
            runs.append(run)
            workshop.say(
                f"{lines:,} lines: upload {run.upload:.2f} s, create to completed "
                f"{run.total:.2f} s, others {run.others:.0%}, loop {run.loop:,.0f} k/s"
            )
    before, large, after = runs
    small = (before.total + after.total) / 2
    yield at_most(
        NAME,
        f"time of {LARGE:,} lines ÷ time of {SMALL:,}",
        large.total / small,
        10.5,
        detail=f"{before.total:.2f} s, {large.total:.2f} s, {after.total:.2f} s; "
        f"CPU {(large.cpu / LARGE) / (before.cpu / SMALL):.2f} times as much a line; "
        f"last line done to completed {large.tail * 1e3:.0f} ms",
    )
    yield Row(
        bench=NAME,
        what=f"upload of {LARGE:,} lines ÷ upload of {SMALL:,}",
        value=large.upload / ((before.upload + after.upload) / 2),
        detail=f"{before.upload:.2f} s, {large.upload:.2f} s, {after.upload:.2f} s",
    )
    more = _highest(large.usage, large.upload_usage), _highest(before.usage, before.upload_usage)
    names = [name for name in more[0] if name in more[1]]
    worst = max(names, key=lambda name: more[0][name] - more[1][name])
    yield Row(
        bench=NAME,
        what=f"peak memory with ten times the lines, largest rise ({worst})",
        value=more[0][worst] - more[1][worst],
        unit="MiB",
        detail=", ".join(f"{name} {more[1][name]:.0f} → {more[0][name]:.0f}" for name in names),
    )


def _highest(*usages: list[Usage]) -> dict[str, float]:
    highest: dict[str, float] = {}
    for usage in usages:
        for one in usage:
            highest[one.name] = max(highest.get(one.name, 0.0), one.peak_mib)
    return highest
