"""A preemption notice: SIGTERM, and some seconds until the machine is gone."""

import asyncio
import signal
import time
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.kit.batches import Watch, chats, check_answers, ids, outcome, submit
from tests.kit.nats_server import NatsServer
from tests.kit.service_processes import services
from tests.kit.started_lines import executions, read_started, started_to

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(120)]

NOTICE_SECONDS = 8.0
DRAIN_SECONDS = NOTICE_SECONDS - 5.0


async def test_all_is_handed_back_in_time_and_nothing_is_held_against_the_lines(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    folder = tmp_path / "fleet"
    settings = {
        **started_to(folder / "started"),
        "NIGHTSHIFT_EXECUTOR_DRAIN_SECONDS": str(DRAIN_SECONDS),
    }
    async with services(folder, nats_server.url, settings) as fleet:
        await fleet.start(fleet.store())
        gateway, scheduler = fleet.gateway("gateway-0"), fleet.scheduler("scheduler-0")
        first = fleet.executor("executor-0", MODELS="m")
        await fleet.start(gateway, scheduler, first)
        async with AsyncOpenAI(base_url=gateway.base_url, api_key="x", max_retries=8) as client:
            # Some are done in time, some are not, and the rest has no seat.
            lines = [
                *chats(16, "quick", model="m", x_simulate={"delay_ms": 700}),
                *chats(60, "slow", model="m", x_simulate={"delay_ms": 6_000}),
            ]
            for number, line in enumerate(lines):
                line["custom_id"] = f"r{number}"
            watch = Watch(client, await submit(client, lines))
            await watch.until(lambda: watch.done > 0, 30)

            second = fleet.executor("executor-1", MODELS="m")
            second.start()
            noticed = time.monotonic()
            first.send(signal.SIGTERM)
            await asyncio.sleep(0.5)
            # Whoever is in a hurry gains nothing and loses nothing.
            first.send(signal.SIGTERM)
            first.send(signal.SIGINT)
            assert await first.ended() == 0, first.log()
            assert time.monotonic() - noticed < NOTICE_SECONDS
            await second.ready()
            batch = await watch.end(60)
            found = await outcome(client, batch, ids(lines))
            assert found.counts == (len(lines), len(lines), 0)
            check_answers(found, lines)

        started = read_started(folder / "started")
        again = {line: times for line, times in executions(started).items() if times > 1}
        # Only what was in the engine at the end runs again, and none of it alone.
        assert 0 < len(again) <= 64
        assert "lines_apart" not in fleet.stores[0].log(1 << 30)
