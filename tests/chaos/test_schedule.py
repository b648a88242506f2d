"""Faults by a seed while batches run, on both stacks at once; one seed of each is new every time.

A round that fails prints its plans. `make chaos SEED=… ARGS='--rounds 1 --stack …'` repeats one
alone, and `make chaos MINUTES=60` goes on for long.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from services.kit.process.tasks import end
from tests.chaos.round import Report, play
from tests.chaos.stacks import SETTINGS, STACKS

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]

SECONDS: Final = 40.0
SEEDS: Final = {"embedded": 164, "production": 173}
"""Whose plans freeze an executor until others have its lines, and kill what records them."""

Rounds = Mapping[str, "asyncio.Task[Report]"]


async def one_round(stack: str, folder: Path) -> Report:
    """Play a round on a system of its own: the seed that is always tried, and one that is new."""
    seeds = [SEEDS[stack], random.SystemRandom().randrange(1_000_000)]
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s {stack}: {text}")

    say(f"seeds {seeds}")
    system = STACKS[stack](folder, SETTINGS)
    try:
        await system.open()
        report = await play(system, seeds, SECONDS, say)
    except BaseException as fault:
        fault.add_note(f"{stack}, seeds {seeds}; the end of its logs:\n{system.log_end()}")
        raise
    finally:
        await system.close()
    say(str(report))
    return report


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rounds(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rounds]:
    """Begin a round on each stack; most of the time is waiting, so that they pass together."""
    folder = tmp_path_factory.mktemp("schedule")
    tasks = {stack: asyncio.create_task(one_round(stack, folder / stack)) for stack in SEEDS}
    yield tasks
    await end(*tasks.values())


@pytest.mark.parametrize("stack", sorted(SEEDS))
async def test_nothing_is_lost_and_nothing_done_twice(rounds: Rounds, stack: str) -> None:
    report = await rounds[stack]
    assert report.made.total() >= 5
    assert report.account is not None
    assert report.account.lines > 1_000
