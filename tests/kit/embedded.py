"""The embedded stack to be hit: one `nightshift up`, its children, and itself."""

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from tests.kit.doctoring import doctor_check
from tests.kit.eventually import eventually
from tests.kit.ports import free_address
from tests.kit.started_lines import started_to
from tests.kit.up import RunningUp, is_running

_BACK_SECONDS: Final = 40.0


class EmbeddedSystem:
    """SQLite, a directory, one NATS, one of each service, some executors."""

    lasting = frozenset({"nats", "store", "scheduler", "gateway", "executor", "up"})
    reaches: Mapping[str, Sequence[str]] = {}

    def __init__(
        self, folder: Path, environment: Mapping[str, str] | None = None, executors: int = 2
    ) -> None:
        """Keep everything below `folder`; `environment` holds settings of the services."""
        self._data = folder / "data"
        self._executors = executors
        self.started_dir = folder / "started"
        self._environment = {**(environment or {}), **started_to(self.started_dir)}
        self._listen = free_address()
        self._up: RunningUp | None = None
        self._pids: dict[str, int] = {}
        # While `up` is away there is nobody to start a child again.
        self._at_up = asyncio.Lock()

    @property
    def processes(self) -> dict[str, list[str]]:
        """Names by kind; `up` is one of them."""
        executors = [f"executor-{number}" for number in range(self._executors)]
        alone = ("nats", "store", "scheduler", "gateway", "up")
        return {**{name: [name] for name in alone}, "executor": executors}

    @property
    def base_urls(self) -> list[str]:
        """The only gateway; the same for every `up`."""
        return [f"http://{self._listen}/v1"]

    @property
    def up(self) -> RunningUp:
        """The `up` that runs now."""
        assert self._up is not None, "not open"
        return self._up

    def pid(self, name: str) -> int:
        """Return a process's id; of the one that was, while it is away."""
        self._pids |= {"up": self.up.process.pid, **self.up.pids()}
        return self._pids[name]

    async def open(self) -> None:
        """Start it, and wait until batches can be taken."""
        self._data.parent.mkdir(parents=True, exist_ok=True)
        arguments = ("--engine", "simulated", "--executors", str(self._executors))
        self._up = RunningUp(self._data, (*arguments, "--listen", self._listen), self._environment)
        await asyncio.to_thread(self._up.wait_ready)

    async def close(self) -> None:
        """Stop it in order; nothing of it may be left."""
        if self._up is None:
            return
        tree = self._up.tree() if self._up.process.poll() is None else []
        status = await asyncio.to_thread(self._up.stop)
        assert status == 0, self.log_end()
        assert [pid for pid in tree if is_running(pid)] == []

    async def kill(self, names: Sequence[str], seconds: float) -> None:
        """SIGKILL these; `up` starts its children again at once, and is itself started again."""
        if "up" in names:
            await self._end_up(signal.SIGKILL, seconds)
            return
        async with self._at_up:
            hit = [await self._signal(name, signal.SIGKILL) for name in names]
            await self._wait_back(hit)

    async def freeze(self, names: Sequence[str], seconds: float) -> None:
        """SIGSTOP these for a while; `up` with its children running on."""
        async with self._at_up:
            hit = [await self._process(name) for name in names]
        # The handles know a process from a later one with the same number.
        for process in hit:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        try:
            await asyncio.sleep(seconds)
        finally:
            for process in hit:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    async def restart(self, names: Sequence[str]) -> None:
        """SIGTERM these; whoever has drained is started again."""
        if "up" in names:
            await self._end_up(signal.SIGTERM, 0.0)
            return
        async with self._at_up:
            hit = [await self._signal(name, signal.SIGTERM) for name in names]
            await self._wait_back(hit)

    async def part(self, name: str, kinds: Sequence[str], seconds: float) -> None:
        """Do nothing of the kind: `up` connects its services itself."""
        raise NotImplementedError

    async def wipe(self, name: str, seconds: float) -> None:
        """Kill the broker and remove its store before `up` can start it again."""
        assert name == "nats", name
        async with self._at_up, self._frozen_up():
            hit = await self._signal(name, signal.SIGKILL)
            await eventually(lambda: not is_running(hit[1]))
            shutil.rmtree(self._data / "nats")
            await asyncio.sleep(seconds)
        await self._wait_back([hit])

    async def check(self) -> None:
        """Check the directory, while it runs."""
        await doctor_check(self._data, deep=True)

    def log_end(self, size: int = 6_000) -> str:
        """Return the end of `up`'s log, to which all of them write."""
        return "" if self._up is None else self._up.log_end(size)

    # --- how --------------------------------------------------------------------------------------

    async def _process(self, name: str) -> psutil.Process:
        if name == "up":
            return psutil.Process(self.up.process.pid)
        deadline = asyncio.get_running_loop().time() + _BACK_SECONDS
        while True:
            with contextlib.suppress(KeyError, psutil.NoSuchProcess):
                return psutil.Process(self.up.pids()[name])
            assert asyncio.get_running_loop().time() < deadline, f"{name} does not come back"
            await asyncio.sleep(0.02)

    async def _signal(self, name: str, number: int) -> tuple[str, int]:
        while True:
            process = await self._process(name)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                if number == signal.SIGTERM:
                    # A stopped process cannot end in order.
                    process.resume()
                return name, process.pid

    async def _wait_back(self, hit: Sequence[tuple[str, int]]) -> None:
        def back() -> bool:
            pids = self.up.pids()
            return all(pids.get(name, old) != old for name, old in hit)

        await eventually(back, within_seconds=_BACK_SECONDS)

    async def _end_up(self, number: signal.Signals, seconds: float) -> None:
        async with self._at_up:
            tree = self.up.tree()
            # Its children end by themselves, killed ones by the guard.
            await asyncio.to_thread(self.up.stop, number)
            await eventually(lambda: not any(map(is_running, tree)), within_seconds=_BACK_SECONDS)
            await asyncio.sleep(seconds)
            await self.open()

    @contextlib.asynccontextmanager
    async def _frozen_up(self) -> AsyncIterator[None]:
        process = psutil.Process(self.up.process.pid)
        process.suspend()
        try:
            yield
        finally:
            process.resume()
