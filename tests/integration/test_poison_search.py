"""Killers among the lines are found though store, scheduler and executors die during the search.

Two executors, two batches that share their engines, several lines that end whatever runs them.
"""

import asyncio
import math
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.kit.batches import Json, Watch, chat, check_answers, ids, outcome, submit
from tests.kit.eventually import eventually
from tests.kit.nats_server import NatsServer
from tests.kit.service_processes import ServiceProcess, services

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(240)]

SEATS = 64
MAX_ATTEMPTS = 3


def lines_with(killers: set[int], total: int) -> list[Json]:
    """Lines of which some end the engine; all hold a seat for a while, so that they meet."""
    return [
        chat(f"r{number}", f"line {number}", "m", x_simulate={"delay_ms": 150, "crash": True})
        if number in killers
        else chat(f"r{number}", f"line {number}", "m", x_simulate={"delay_ms": 150})
        for number in range(total)
    ]


def deaths(*executors: ServiceProcess) -> int:
    """Deaths of engines, as their executors logged them; those of killed ones come on top."""
    return sum(each.log(1 << 30).count('"event": "engine_died"') for each in executors)


async def test_counts_of_deaths_outlive_everybody(tmp_path: Path, nats_server: NatsServer) -> None:
    async with services(tmp_path / "fleet", nats_server.url) as fleet:
        store = fleet.store()
        await fleet.start(store)
        gateway, scheduler = fleet.gateway("gateway-0"), fleet.scheduler("scheduler-0")
        executors = [fleet.executor(f"executor-{n}", MODELS="m") for n in range(2)]
        await fleet.start(gateway, scheduler, *executors)
        killers = ({11}, {3, 60})
        async with AsyncOpenAI(base_url=gateway.base_url, api_key="x", max_retries=8) as client:
            inputs = [lines_with(some, 80) for some in killers]
            watches = [
                Watch(client, await submit(client, lines), through_faults=True) for lines in inputs
            ]

            kills = 0
            for number, victim in enumerate((store, executors[0], scheduler, executors[1])):
                # Each time the search has come a step further since the last one.
                await eventually(
                    lambda least=1 + number: deaths(*executors) >= least, within_seconds=40
                )
                await victim.kill()
                victim.start()
                kills += victim in executors

            ends = await asyncio.gather(*(watch.end(120) for watch in watches))
            for batch, lines, some in zip(ends, inputs, killers, strict=True):
                found = await outcome(client, batch, ids(lines))
                assert found.codes == {f"r{number}": "engine_failure" for number in some}
                assert found.counts == (80, 80 - len(some), len(some))
                check_answers(found, lines)
        found_in = math.ceil(math.log2(SEATS)) + MAX_ATTEMPTS
        # An executor that is killed may be a death that nobody saw, and undo a step.
        assert deaths(*executors) <= 3 * found_in + 2 * kills
