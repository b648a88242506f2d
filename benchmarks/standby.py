"""Start to ready, and what the services hold while they have nothing to do."""

import time
from collections.abc import Iterator
from typing import Final

from benchmarks.processes import Meter, has_mapped, resident_mib
from benchmarks.report import Row, at_most
from benchmarks.system import running, simulated_lines
from benchmarks.workshop import Workshop

NAME: Final = "standby"

STARTS: Final = 5
_IDLE_SECONDS: Final = 10.0
_SERVICES: Final = ("gateway", "store", "scheduler")


def measure(workshop: Workshop) -> Iterator[Row]:
    """Start the system `STARTS` times; look at the last one after it did some work and rested."""
    seconds = []
    for _ in range(STARTS - 1):
        with running() as system:
            seconds.append(system.up.seconds_to_ready)
    with running() as system:
        seconds.append(system.up.seconds_to_ready)
        system.wait_serving(simulated_lines(64), 60)
        pids = system.pids()
        meter = Meter(pids)
        time.sleep(_IDLE_SECONDS)
        usage = meter.stop()
        resident = {name: resident_mib(pid) for name, pid in pids.items()}
        torch = [name for name in _SERVICES if has_mapped(pids[name], "/torch/")]
    workshop.say(f"ready after {', '.join(f'{one:.2f}' for one in seconds)} s")
    yield at_most(
        NAME,
        f"`nightshift up` to ready, worst of {STARTS}",
        max(seconds),
        3,
        unit="s",
        detail=", ".join(f"{one:.2f}" for one in seconds),
    )
    yield at_most(
        NAME,
        "idle memory, largest of gateway, store, scheduler",
        max(resident[name] for name in _SERVICES),
        120,
        unit="MiB",
        detail=", ".join(f"{name} {size:.0f}" for name, size in sorted(resident.items())),
    )
    yield at_most(
        NAME,
        "of these, how many have torch (so vLLM) loaded",
        len(torch),
        0,
        detail=", ".join(torch),
    )
    busy = sum(one.cpu_seconds for one in usage) / meter.seconds * 100
    yield Row(
        bench=NAME,
        what="CPU of all services while idle",
        value=busy,
        unit="% of a core",
        detail=", ".join(f"{one.name} {one.cpu_seconds / meter.seconds:.1%}" for one in usage),
    )
