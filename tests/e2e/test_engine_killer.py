"""A line that ends the real vLLM is found among 64, in few deaths; the others are answered."""

import math
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.e2e.killer import LINES, MODEL, POISON, SPLITTING, lines_with_a_killer
from tests.kit.batches import Watch, chat, ids, outcome, submit
from tests.kit.up import RunningUp, running_up

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    # Each death costs a start, of 15 to 40 s on two cores.
    pytest.mark.timeout(1_200),
]

SEATS = 4
SEARCH_SECONDS = 1_000
STALL_SECONDS = 10
MAX_ATTEMPTS = 3


@pytest.fixture(scope="module")
def system(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    """Serve the tiny model with what keeps the killer harmless turned off."""
    arguments = [
        *("--model", f"{MODEL}={tiny_model}"),
        *("--engine-args", f"{MODEL}: --max-num-seqs {SEATS} {' '.join(SPLITTING)}"),
    ]
    environment = {"NIGHTSHIFT_EXECUTOR_STALL_SECONDS": str(STALL_SECONDS)}
    folder = tmp_path_factory.mktemp("killer") / "data"
    with running_up(folder, arguments, environment) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(system: RunningUp) -> AsyncIterator[AsyncOpenAI]:
    """The official client, as a user makes it."""
    async with AsyncOpenAI(base_url=system.base_url, api_key="anything") as official:
        yield official


class Cores:
    """The engine's processes as seen from outside: each new one stands for a death before it."""

    def __init__(self, system: RunningUp) -> None:
        """Look below the executor of `system`."""
        self._executor = system.pids()["executor-0"]
        self.seen: list[int] = []

    def look(self) -> psutil.Process | None:
        """Note the engine core that runs now, and return it."""
        for process in psutil.Process(self._executor).children(recursive=True):
            try:
                found = "EngineCore" in " ".join(process.cmdline())
            except psutil.Error:
                continue
            if found and process.status() != psutil.STATUS_ZOMBIE:
                if process.pid not in self.seen:
                    self.seen.append(process.pid)
                return process
        return None


async def test_the_very_line_is_found_among_64(system: RunningUp, client: AsyncOpenAI) -> None:
    lines = lines_with_a_killer()
    cores = Cores(system)
    watch = Watch(client, await submit(client, lines))

    def over() -> bool:
        cores.look()
        return watch.ended

    await watch.until(over, SEARCH_SECONDS)
    found = await outcome(client, watch.batch, ids(lines))
    assert found.batch.status == "completed"
    assert found.counts == (LINES, LINES - 1, 1)
    assert found.codes == {f"r{POISON}": "engine_failure"}
    # No more than were in the engine are suspects; the death that made them so counts too.
    assert MAX_ATTEMPTS <= len(cores.seen) - 1 <= math.ceil(math.log2(SEATS)) + MAX_ATTEMPTS


async def test_an_engine_that_hangs_costs_no_line(system: RunningUp, client: AsyncOpenAI) -> None:
    lines = [
        chat(f"r{number}", f"{number}", MODEL, max_tokens=300, ignore_eos=True)
        for number in range(32)
    ]
    cores = Cores(system)
    watch = Watch(client, await submit(client, lines))
    await watch.half_way(SEARCH_SECONDS)
    core = cores.look()
    assert core is not None
    os.kill(core.pid, signal.SIGSTOP)
    batch = await watch.end(SEARCH_SECONDS)
    found = await outcome(client, batch, ids(lines))
    assert found.counts == (32, 32, 0)
    # Stopped processes do not hear that they shall end, and were ended all the same.
    assert not core.is_running()
    assert cores.look() is not None
    assert len(cores.seen) == 2
