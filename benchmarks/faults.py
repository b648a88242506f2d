"""Cancel to engine idle, and how long work stands still when a process is killed."""

import contextlib
import http.client
import os
import signal
import time
from collections.abc import Iterator
from typing import Final

from benchmarks.report import Row, at_most
from benchmarks.system import (
    ENDED,
    Json,
    Refused,
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
_WATCH_SECONDS: Final = 12.0
_SERVICES: Final = ("store", "scheduler", "gateway", "nats")


def measure(workshop: Workshop) -> Iterator[Row]:
    """Cancel first, then each kill `TIMES` times."""
    yield from _measure_cancel(workshop)
    yield _measure_executor(workshop, signal.SIGKILL)
    yield _measure_executor(workshop, signal.SIGSTOP)
    yield from _measure_services(workshop)


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


def _measure_executor(workshop: Workshop, number: signal.Signals) -> Row:
    """Two executors hold a batch's lines; one is hit; its lines run again elsewhere."""
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
            pid = system.up.kill("executor-0", number)
            one, all_ = _until_rerun(system, batch["id"])
            if number == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
            first.append(one)
            last.append(all_)
            _settle(system)
    workshop.say(f"executor {number.name}: lines ran again after {_list(first)}..{_list(last)} s")
    hit = "killed" if number == signal.SIGKILL else "frozen"
    return at_most(
        NAME,
        f"executor {hit}, to its lines running again, worst of {TIMES}",
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


def _measure_services(workshop: Workshop) -> Iterator[Row]:
    """A batch makes steady progress while each other process is killed."""
    # 640 lines/s; a new batch follows where one ends before the kills do.
    lines = simulated_lines(40_000, simulate={"delay_ms": SEATS / 640 * 1e3})
    stalls: dict[str, list[tuple[float, float]]] = {}
    with running() as system:
        system.wait_serving(simulated_lines(SEATS), 60)
        work = _Work(system, system.api.upload(lines))
        calm, _ = work.longest_stall(time.monotonic(), seconds=5.0)
        for _ in range(TIMES):
            for name in _SERVICES:
                work.renew()
                old = system.up.pids()[name]
                began = time.monotonic()
                system.up.kill(name)
                system.up.wait_restarted(name, old)
                stalls.setdefault(name, []).append(
                    work.longest_stall(began, seconds=_WATCH_SECONDS)
                )
        work.cancel()
    for name, found in stalls.items():
        text = ", ".join(f"{stall:.2f} (back after {back:.2f})" for stall, back in found)
        workshop.say(f"{name} killed: no progress seen for {text} s")
        yield at_most(
            NAME,
            f"{name} killed, time without progress less time until it is back, worst of {TIMES}",
            max(max(stall - back, 0.0) for stall, back in found),
            3,
            unit="s",
            detail=f"without progress {text}; {calm:.2f} s without a kill, since frames are "
            "stored once a second",
        )


class _Work:
    """A batch that is under way, and how far it was seen to be."""

    def __init__(self, system: System, file_id: str) -> None:
        self._system = system
        self._file_id = file_id
        self._batch: Json = {}
        self._done = 0
        self._start()

    def _start(self) -> None:
        self._batch = self._system.api.create(self._file_id)
        self._done = 0
        # From here on lines are known to be done.
        self.longest_stall(time.monotonic(), seconds=3.0)

    def renew(self) -> None:
        """Start another batch where too little of this one is left to watch."""
        counts = self._system.api.batch(self._batch["id"])["request_counts"]
        self._done = counts["completed"]
        if counts["total"] - self._done < 640 * _WATCH_SECONDS * 1.5:
            self.cancel()
            self._start()

    def cancel(self) -> None:
        """End it."""
        self._system.api.post(f"/v1/batches/{self._batch['id']}/cancel")

    def longest_stall(self, began: float, *, seconds: float) -> tuple[float, float]:
        """Poll until `seconds` after `began`.

        Returns:
            the longest time without progress seen, and the time until gateway and store answered
            (of the others' return nothing is seen but the progress).
        """
        last, longest, back = began, 0.0, 0.0
        while (now := time.monotonic()) < began + seconds:
            # Nobody answers while gateway or store are away; that counts as no progress.
            with contextlib.suppress(OSError, http.client.HTTPException, Refused):
                batch = self._system.api.batch(self._batch["id"])
                now = time.monotonic()
                back = back or now - began
                if batch["request_counts"]["completed"] > self._done:
                    self._done = batch["request_counts"]["completed"]
                    longest, last = max(longest, now - last), now
            time.sleep(_POLL_SECONDS)
        return max(longest, now - last), back


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
