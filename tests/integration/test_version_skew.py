"""Services of two versions side by side: each does what it understands, and leaves the rest."""

import sys
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from protos.nightshift.v1 import common_pb2, dispatch_pb2
from services.kit.calls import rpc
from services.kit.messages import bus
from services.kit.process.clock import SystemClock
from services.kit.wire.ids import pool_id_of
from services.scheduler.leader import Leader
from services.scheduler.queues import Queues
from services.scheduler.work_client import WorkClient
from tests.kit.batches import Outcome, chats, check_answers, run
from tests.kit.nats_server import NatsServer
from tests.kit.scripted_window import SECRET, ScriptedWindow
from tests.kit.service_processes import ServiceProcess, services
from tests.kit.started_lines import executions, read_started, started_to

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

NEWER = """
import runpy, sys
from services.kit.messages import pull
pull.MESSAGE_VERSION += 1
from services.executor.engines.simulated import engine
engine._VERSION = "newer"
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""
"""Runs a service of the next version: its messages are newer, and its engine is another one."""


def newer(process: ServiceProcess) -> ServiceProcess:
    """Have a process be of the next version from its next start on."""
    process.command = (sys.executable, "-c", NEWER, process.command[-1])
    return process


async def test_an_older_executor_leaves_newer_messages_to_a_newer_one(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    seats = tmp_path / "seats"
    async with services(tmp_path / "fleet", nats_server.url, started_to(seats)) as fleet:
        store = fleet.store()
        former = list(store.command)
        newer(store)
        fleet.scheduler("scheduler")
        older = fleet.executor("older")
        newer(fleet.executor("newer"))
        gateway = fleet.gateway("gateway")
        await fleet.start()
        async with AsyncOpenAI(base_url=gateway.base_url, api_key="x") as client:
            found = await ran(client, "new", 600)
            assert {each.executor for each in read_started(seats)} == {"newer"}
            assert executions(read_started(seats)).most_common(1)[0][1] == 1
            # It met some, and left each of them for longer than the time before.
            met = older.log(1_000_000).count("dispatch_of_newer_version")
            assert 0 < met < 200
            assert len(revisions(found)) == 1

            # What the older one writes is understood by both.
            store.command = former
            await store.restart()
            await store.ready()
            found = await ran(client, "old", 3_000)
            assert {each.executor for each in read_started(seats)} == {"older", "newer"}
            assert len(revisions(found)) == 2


async def ran(client: AsyncOpenAI, text: str, count: int) -> Outcome:
    """Run a batch of some seconds to its end; each line has its own answer, once."""
    lines = chats(count, text, x_simulate={"delay_ms": 100})
    found = await run(client, lines, within_seconds=40)
    check_answers(found, lines)
    assert found.counts == (count, count, 0)
    return found


def revisions(found: Outcome) -> list[str]:
    """Return which engine configurations ran a batch of one pool."""
    told: Any = found.batch.model_extra
    [engines] = told["nightshift"]["engines"]
    return list(engines["revisions"])


async def test_what_a_scheduler_does_not_know_travels_on(nats_server: NatsServer) -> None:
    pool = pool_id_of("llama")
    plain = dispatch_pb2.Dispatch(
        version=1,
        batch_id="batch_1",
        chunk_id="chunk_1",
        dispatch=2,
        pool_id=pool,
        line_count=3,
        lines=[common_pb2.LineRange(first=0, count=3)],
    )
    # Field 1000 of some later version, a number.
    unknown = bytes([0xC0, 0x3E, 0x2A])
    work = ScriptedWindow()
    work.freed.append(dispatch_pb2.Dispatch.FromString(plain.SerializeToString() + unknown))
    server = await work.serve()
    connection = await bus.connect(nats_server.url, "test")
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        client = WorkClient(channel, SECRET)
        leader = Leader(client, holder="one", clock=SystemClock())
        assert await leader.run_once()
        queues = Queues(connection, leader, SystemClock())
        await queues.ensure([pool])
        assert await queues.publish(1, await client.reclaim(1, {pool: 0})) == 1
        [delivery] = await (await connection.pull_from(pool)).fetch(1)
        assert delivery.message.data.endswith(unknown)
        assert delivery.dispatch.SerializeToString() == plain.SerializeToString() + unknown
    await connection.close()
    await server.server.stop(0)
