"""How long work stands still when a process is killed, on the embedded and the production parts."""

import asyncio
import contextlib
import json
import math
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from benchmarks.report import Row, at_most
from benchmarks.system import ENDED, Json, simulated_lines
from benchmarks.workshop import Workshop
from tests.kit.embedded import EmbeddedSystem
from tests.kit.eventually import eventually
from tests.kit.production import ProductionSystem
from tests.kit.started_lines import read_started
from tests.kit.system import System

NAME: Final = "recovery"

TIMES: Final = 3
SEATS: Final = 64
_ACK_WAIT_SECONDS: Final = 10.0
_DELAY_SECONDS: Final = 3.0
_AWAY_SECONDS: Final = 15.0
"""How long a killed executor stays away where nobody starts it again at once."""
_WATCH_SECONDS: Final = 10.0
"""How long a kill is watched, and half of that at least from when it is back."""
_CALM_SECONDS: Final = 5.0
_STEADY_LINES: Final = 40_000
_FAST_SECONDS: Final = 0.2
_MODEL_SECONDS: Final = 2.0
"""How long a line takes: 320 lines/s an executor, or 32, which is more like a model's."""
_POLL_SECONDS: Final = 0.02
_PATIENCE_SECONDS: Final = 60.0

Make = Callable[[Path], System]
_STACKS: Final[dict[str, Make]] = {
    "embedded": lambda folder: EmbeddedSystem(folder, executors=2),
    "production": lambda folder: ProductionSystem(folder),
}
_KINDS: Final = ("gateway", "store", "scheduler", "nats", "postgres")


def measure(workshop: Workshop) -> Iterator[Row]:
    """Measure each stack by itself."""
    for stack, make in _STACKS.items():
        try:
            rows = asyncio.run(_measure(workshop, stack, make))
        except asyncio.CancelledError:
            sys.exit(128 + signal.SIGTERM)
        yield from rows


async def _measure(workshop: Workshop, stack: str, make: Make) -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="nightshift-benchmark-"))
    system = make(folder)
    measuring = asyncio.current_task()
    assert measuring is not None
    # What was started is to end with us, however we are told to stop.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, measuring.cancel)
    try:
        await system.open()
        async with httpx.AsyncClient(timeout=30) as http:
            bench = _Bench(workshop, stack, system, http)
            rows = [await bench.executor()]
            rows += await bench.services()
        await system.close()
        return rows
    finally:
        with contextlib.suppress(AssertionError):
            await system.close()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Stall:
    """What was seen after a kill: seconds without progress, and seconds until it was back."""

    longest: float
    back: float

    @property
    def after(self) -> float:
        """Seconds without progress less those in which it was away."""
        return max(self.longest - self.back, 0.0)

    def __str__(self) -> str:
        return f"{self.longest:.2f} (back after {self.back:.2f})"


class _Bench:
    """The measurements on one system."""

    def __init__(
        self, workshop: Workshop, stack: str, system: System, http: httpx.AsyncClient
    ) -> None:
        self._workshop = workshop
        self._stack = stack
        self._system = system
        self._http = http
        self._batch: Json = {}
        self._done = 0
        self._line_seconds = _FAST_SECONDS
        self._calm = 0.0

    # --- an executor ------------------------------------------------------------------------------

    async def executor(self) -> Row:
        """Kill the one of two that holds more, the other has room; the engines' notes say when."""
        found = []
        for _ in range(TIMES):
            await self._until_both_serve()
            found.append(await self._kill_executor())
        first = ", ".join(f"{one:.2f}" for one, _ in found)
        last = ", ".join(f"{one:.2f}" for _, one in found)
        self._workshop.say(f"{self._stack}: executor killed, lines again after {first}..{last} s")
        return at_most(
            NAME,
            f"{self._stack}: executor killed, to its lines running again, worst of {TIMES}",
            max(one for one, _ in found),
            _ACK_WAIT_SECONDS + 1,
            unit="s",
            detail=f"{first}; the last of its lines {last} (suspects run a chunk at a time); "
            f"two executors of {SEATS} seats, {SEATS} lines of {_DELAY_SECONDS:.0f} s",
        )

    async def _kill_executor(self) -> tuple[float, float]:
        """Return when the first and the last of its lines ran again, in seconds from the kill."""
        lines = simulated_lines(SEATS, simulate={"delay_ms": _DELAY_SECONDS * 1e3})
        batch = await self._create(lines)
        await eventually(
            lambda: len(self._runs(batch)) == SEATS,
            within_seconds=_PATIENCE_SECONDS,
            every_seconds=_POLL_SECONDS,
        )
        before = self._runs(batch)
        [(victim, _)] = Counter(name for name, _, _ in before.values()).most_common(1)
        lost = {line for line, (name, _, _) in before.items() if name == victim}
        killed_at = time.time()
        kill = asyncio.create_task(self._system.kill([victim], _AWAY_SECONDS))
        while True:
            now = self._runs(batch)
            again = [now[line][2] - killed_at for line in lost if now[line] != before[line]]
            if len(again) == len(lost):
                break
            assert time.time() < killed_at + 120, f"{len(lost) - len(again)} lines do not run again"
            await asyncio.sleep(_POLL_SECONDS)
        await self._end(batch)
        await kill
        return min(again), max(again)

    def _runs(self, batch: Json) -> dict[int, tuple[str, str, float]]:
        """Return by whom each line of a batch was started last: executor, incarnation, when."""
        return {
            each.line: (each.executor, each.incarnation, each.at)
            for each in read_started(self._system.started_dir)
            if each.batch_id == batch["id"]
        }

    async def _until_both_serve(self) -> None:
        lines = simulated_lines(4 * SEATS, simulate={"delay_ms": 50})
        while True:
            batch = await self._create(lines)
            await self._end(batch)
            if len({name for name, _, _ in self._runs(batch).values()}) == 2:
                return

    # --- the others -------------------------------------------------------------------------------

    async def services(self) -> list[Row]:
        """Kill each other process while a batch makes steady progress."""
        await self._steady()
        self._calm = await self._longest_stall(time.monotonic(), _CALM_SECONDS)
        rows = [await self._kills(kind) for kind in _KINDS if kind in self._system.processes]
        if len(self._system.processes["nats"]) > 1:
            # Where a stream's leader dies, the others take 4 to 9 s to choose another: who has more
            # seconds of work in hand does not notice.
            await self._next(_MODEL_SECONDS)
            rows.append(await self._kills("nats"))
        await self._ask("POST", f"/batches/{self._batch['id']}/cancel")
        return rows

    async def _kills(self, kind: str) -> Row:
        count = len(self._system.processes[kind])
        stalls = [await self._kill(self._choose(kind, turn)) for turn in range(TIMES)]
        text = ", ".join(str(stall) for stall in stalls)
        rate = SEATS / self._line_seconds
        what = "leading scheduler" if kind == "scheduler" else kind
        of = f" (of {count})" if count > 1 else ""
        self._workshop.say(f"{self._stack}: {what}{of} killed: no progress seen for {text} s")
        return at_most(
            NAME,
            f"{self._stack}: {what}{of} killed, time without progress less time until it is "
            f"back, worst of {TIMES}",
            max(stall.after for stall in stalls),
            3,
            unit="s",
            detail=f"{rate:.0f} lines/s an executor; without progress {text}; {self._calm:.2f} s "
            "without a kill, since frames are stored once a second",
        )

    def _choose(self, kind: str, turn: int) -> str:
        """Return whom to kill: the leading scheduler, or each of a kind in its turn."""
        names = self._system.processes[kind]
        if kind == "scheduler" and isinstance(self._system, ProductionSystem):
            return max(names, key=self._led_at)
        return names[turn % len(names)]

    def _led_at(self, name: str) -> str:
        assert isinstance(self._system, ProductionSystem)
        won = [
            json.loads(line)["timestamp"]
            for line in self._system.log_of(name).splitlines()
            if '"leadership_won"' in line
        ]
        return max(won, default="")

    async def _kill(self, name: str) -> _Stall:
        await self._steady()
        old = self._system.pid(name)
        began = time.monotonic()
        kill = asyncio.create_task(self._system.kill([name], 0.0))
        back = asyncio.create_task(self._until_back(name, old, began))
        longest = await self._longest_stall(began, _WATCH_SECONDS, back)
        await kill
        return _Stall(longest, back.result())

    async def _until_back(self, name: str, old: int, began: float) -> float:
        """Return when another process of that name listened, in seconds from `began`."""
        await eventually(
            lambda: _listens(self._system.pid(name), old),
            within_seconds=_PATIENCE_SECONDS,
            every_seconds=_POLL_SECONDS,
        )
        return time.monotonic() - began

    async def _steady(self) -> None:
        """Have a batch under way that lasts until the next kill has been watched."""
        left = _STEADY_LINES - self._done if self._batch else 0
        if left < 2 * SEATS / self._line_seconds * _WATCH_SECONDS * 1.5:
            await self._next(self._line_seconds)

    async def _next(self, line_seconds: float) -> None:
        """Go on with another batch, whose lines take `line_seconds`."""
        if self._batch:
            await self._ask("POST", f"/batches/{self._batch['id']}/cancel")
        self._line_seconds = line_seconds
        self._batch = await self._create(_steady_lines(line_seconds))
        self._done = 0
        # From here on lines are known to be done.
        await self._longest_stall(time.monotonic(), _CALM_SECONDS)

    async def _longest_stall(
        self, began: float, seconds: float, back: "asyncio.Task[float] | None" = None
    ) -> float:
        """Poll until `seconds` after `began`; return the longest time without progress seen.

        With `back`, which says after how many seconds a process was back, half of it longer then.
        """
        last, longest = began, 0.0

        def watched() -> float:
            if back is None:
                return seconds
            return max(seconds, back.result() + seconds / 2) if back.done() else math.inf

        while (now := time.monotonic()) < began + watched():
            # Nobody answers while gateway or store are away; that counts as no progress.
            with contextlib.suppress(httpx.HTTPError):
                batch = await self._ask("GET", f"/batches/{self._batch['id']}")
                now = time.monotonic()
                if batch["request_counts"]["completed"] > self._done:
                    self._done = batch["request_counts"]["completed"]
                    longest, last = max(longest, now - last), now
            await asyncio.sleep(_POLL_SECONDS)
        return max(longest, now - last)

    # --- the client -------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, **how: Any) -> Json:
        """Ask one gateway after the other, as a load balancer would."""
        for url in self._system.base_urls[:-1]:
            with contextlib.suppress(httpx.HTTPError):
                return await self._once(method, url + path, **how)
        return await self._once(method, self._system.base_urls[-1] + path, **how)

    async def _once(self, method: str, url: str, **how: Any) -> Json:
        answer = await self._http.request(method, url, **how)
        answer.raise_for_status()
        found: Json = answer.json()
        return found

    async def _create(self, lines: bytes) -> Json:
        files = {"file": ("in.jsonl", lines)}
        uploaded = await self._ask("POST", "/files", data={"purpose": "batch"}, files=files)
        return await self._ask(
            "POST",
            "/batches",
            json={
                "input_file_id": uploaded["id"],
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            },
        )

    async def _end(self, batch: Json) -> None:
        while batch["status"] not in ENDED:
            await asyncio.sleep(_POLL_SECONDS)
            batch = await self._ask("GET", f"/batches/{batch['id']}")
        assert batch["status"] == "completed", batch


def _steady_lines(line_seconds: float) -> bytes:
    """Return lines that take half as long to half as long again, so that no two seats keep step."""
    shares = [0.5 + (7 * number % 16 + 0.5) / 16 for number in range(16)]
    return b"".join(
        simulated_lines(
            1, first=number, simulate={"delay_ms": line_seconds * shares[number % 16] * 1e3}
        )
        for number in range(_STEADY_LINES)
    )


def _listens(pid: int, old: int) -> bool:
    """Tell whether a process that is not `old` takes connections."""
    if pid == old:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        connections = psutil.Process(pid).net_connections(kind="tcp")
        return any(one.status == psutil.CONN_LISTEN for one in connections)
    return False
