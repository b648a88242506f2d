"""Cancel to engine idle, and how long lines stand still in an executor that is frozen."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Final

from benchmarks.report import Row, at_most
from benchmarks.system import (
    ENDED,
    System,
    require_completed,
    running,
    simulated_lines,
)
from benchmarks.workshop import Workshop

NAME: Final = "faults"

TIMES: Final = 3
SEATS: Final = 64
_ACK_WAIT_SECONDS: Final = 10.0
_TWO: Final = ("--engine", "simulated", "--executors", "2")
_POLL_SECONDS: Final = 0.01
_DELAY_SECONDS: Final = 3.0


def measure(workshop: Workshop) -> Iterator[Row]:
    """Each `TIMES` times. What happens when processes are killed is `recovery`'s to measure."""
    yield from _measure_cancel(workshop)
    yield _measure_frozen(workshop)


def _measure_cancel(workshop: Workshop) -> Iterator[Row]:
    """All seats are held by slow lines; after their cancel another batch gets them."""
    slow = simulated_lines(4 * SEATS, simulate={"delay_ms": 60_000})
    quick = simulated_lines(1)
    took, ended = [], []
    with running() as system:
        system.wait_serving(simulated_lines(SEATS), 60)
        slow_file, quick_file = system.api.upload(slow), system.api.upload(quick)
        for _ in range(TIMES):
            held = system.api.create(slow_file)
            # The second batch can only wait once the first one holds every seat.
            time.sleep(2.0)
            waiting = system.api.create(quick_file)
            time.sleep(0.5)
            found = system.api.batch(waiting["id"])
            assert found["status"] == "in_progress", f"the seats were not held: {found}"
            began = time.monotonic()
            system.api.post(f"/v1/batches/{held['id']}/cancel")
            seen = system.api.follow(waiting["id"], every_seconds=_POLL_SECONDS)
            took.append(seen.ended_at - began)
            seen = system.api.follow(held["id"], every_seconds=_POLL_SECONDS)
            assert seen.batch["status"] == "cancelled", seen.batch
            ended.append(seen.ended_at - began)
    workshop.say(f"cancel: seats free after {_list(took)} s, cancelled after {_list(ended)} s")
    yield at_most(
        NAME,
        f"cancel to the seats serving another batch, worst of {TIMES}",
        max(took),
        1,
        unit="s",
        detail=f"{_list(took)}; {SEATS} seats were held by lines of 60 s",
    )
    yield at_most(
        NAME,
        f"cancel to `cancelled`, worst of {TIMES}",
        max(ended),
        2.5,
        unit="s",
        detail=_list(ended),
    )


def _measure_frozen(workshop: Workshop) -> Row:
    """Two executors hold a batch's lines; one is frozen; its lines run again elsewhere."""
    lines = simulated_lines(2 * SEATS, simulate={"delay_ms": _DELAY_SECONDS * 1e3})
    first, last = [], []
    with running(_TWO) as system:
        # Both have to be there before lines are dealt.
        system.wait_serving(simulated_lines(4_000), 60)
        time.sleep(2.0)
        file_id = system.api.upload(lines)
        for _ in range(TIMES):
            batch = system.api.create(file_id)
            time.sleep(_DELAY_SECONDS / 2)
            pid = system.up.kill("executor-0", signal.SIGSTOP)
            one, all_ = _until_rerun(system, batch["id"])
            os.kill(pid, signal.SIGCONT)
            first.append(one)
            last.append(all_)
            _settle(system)
    workshop.say(f"executor frozen: lines ran again after {_list(first)}..{_list(last)} s")
    return at_most(
        NAME,
        f"executor frozen, to its lines running again, worst of {TIMES}",
        max(first),
        _ACK_WAIT_SECONDS + 1,
        unit="s",
        detail=f"{_list(first)}; the last of them {_list(last)} (suspects run a chunk at a time); "
        f"two executors, {2 * SEATS} lines of {_DELAY_SECONDS:.0f} s",
    )


def _until_rerun(system: System, batch_id: str) -> tuple[float, float]:
    """Return when, from now, the first and the last line that stood still began to run again.

    What the other executor holds is done within two delays; the longest time without progress ends
    when the first line that was lost is done, one delay after it began again.
    """
    began = time.monotonic()
    steps = [began]
    done = 0
    while True:
        batch = system.api.batch(batch_id)
        if batch["request_counts"]["completed"] > done:
            done = batch["request_counts"]["completed"]
            steps.append(time.monotonic())
        if batch["status"] in ENDED:
            break
        assert time.monotonic() < began + 120, batch
        time.sleep(_POLL_SECONDS)
    require_completed(batch)
    longest = max(range(1, len(steps)), key=lambda i: steps[i] - steps[i - 1])
    first = steps[longest] - began - _DELAY_SECONDS
    return max(first, 0.0), max(steps[-1] - began - _DELAY_SECONDS, 0.0)


def _settle(system: System) -> None:
    """Wait until a small batch passes again, and both executors had a beat or two."""
    system.wait_serving(simulated_lines(SEATS), 60)
    time.sleep(3.0)


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
