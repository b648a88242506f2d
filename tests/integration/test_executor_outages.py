"""The executor while its store or its broker is away."""

import time
from pathlib import Path

import pytest

from services.executor.chunks import endings, keep_alive, puller
from services.kit.messages import bus as buses
from services.kit.messages import subjects
from tests.kit.eventually import eventually
from tests.kit.executor_fleet import POOL, Fleet, fleet, lines
from tests.kit.nats_server import NatsServer
from tests.kit.scripted_store import chat_line

__all__ = ["fleet"]

pytestmark = [pytest.mark.integration, pytest.mark.slow]


async def test_unacknowledged_frames_are_sent_again_on_a_new_stream(fleet: Fleet) -> None:
    fleet.work.break_streams = 2
    await fleet.publish(fleet.work.add_chunk(lines(5), pool_id=POOL))
    await fleet.start()
    await fleet.settled()
    [chunk] = fleet.work.chunks.values()
    assert chunk.done
    assert len(fleet.work.named("AppendResults")) == 3


async def test_work_goes_on_when_the_store_was_away(fleet: Fleet) -> None:
    assert fleet.server is not None
    address = fleet.address
    texts = [chat_line("slow", x_simulate={"delay_ms": 500}), *lines(2)]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    executor = await fleet.start()
    await eventually(lambda: executor.runner.in_flight == 1)
    await fleet.server.drain(0)
    late = fleet.work.add_chunk(lines(2), pool_id=POOL, first=10)
    await fleet.publish(late)
    await eventually(lambda: executor.runner.in_flight == 0)
    await fleet.serve(address)
    back = time.monotonic()
    await eventually(lambda: all(chunk.done for chunk in fleet.work.chunks.values()))
    assert time.monotonic() - back < 6
    await fleet.settled()


async def test_nothing_is_taken_while_the_store_does_not_answer(fleet: Fleet) -> None:
    """What it cannot open goes back once, and not again and again: others may reach the store."""

    async def delivered() -> int:
        info = await fleet.bus._jetstream.consumer_info("WORK", subjects.durable_of(POOL))
        return info.delivered.consumer_seq if info.delivered else 0

    first = fleet.work.add_chunk(lines(2), pool_id=POOL)
    await fleet.publish(first)
    await fleet.start()
    await eventually(lambda: fleet.work.chunks[first.chunk_id].done)
    fleet.work.away = True
    second = fleet.work.add_chunk(lines(2), pool_id=POOL, first=10)
    await fleet.publish(second)
    before = await eventually(delivered)
    until = time.monotonic() + 2
    await eventually(lambda: time.monotonic() > until)
    assert await delivered() - before <= 3
    fleet.work.away = False
    await eventually(lambda: fleet.work.chunks[second.chunk_id].done)
    await fleet.settled()


async def test_lines_run_on_while_the_store_is_away_for_longer_than_messages_wait(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their message is left to the broker, and taken again where nobody else took it."""
    for module in (keep_alive, endings, puller):
        monkeypatch.setattr(module, "ACK_WAIT_SECONDS", 3.0)
    monkeypatch.setattr(keep_alive, "IN_PROGRESS_SECONDS", 0.5)
    dispatch = fleet.work.add_chunk(
        [chat_line("slow", x_simulate={"delay_ms": 9_000})], pool_id=POOL
    )
    await fleet.publish(dispatch)
    executor = await fleet.start()
    await eventually(lambda: executor.runner.in_flight == 1)
    fleet.work.away = True
    [attempt] = executor.attempts
    await eventually(lambda: attempt.released)
    fleet.work.away = False
    await eventually(lambda: not attempt.released)
    assert executor.runner.in_flight == 1
    await fleet.settled()
    assert fleet.work.chunks[dispatch.chunk_id].results_seen == 1
    assert len(fleet.work.named("OpenAttempt")) == 1


async def test_a_broker_that_dies_before_it_noted_its_deliveries_has_nothing_run_twice(
    fleet: Fleet, nats_server: NatsServer, tmp_path: Path
) -> None:
    """It notes them a tenth of a second late, and delivers anew what it had not noted."""
    dispatches = [
        fleet.work.add_chunk(
            [chat_line(f"slow-{n}", x_simulate={"delay_ms": 4_000})], pool_id=POOL, first=n
        )
        for n in range(4)
    ]
    await fleet.publish(*dispatches)
    nats_server.stop()
    nats_server.save(tmp_path / "before")
    nats_server.start()
    executor = await fleet.start()
    await eventually(lambda: executor.runner.in_flight == len(dispatches))
    held = {attempt: attempt.delivery for attempt in executor.attempts}
    nats_server.kill()
    nats_server.put_back(tmp_path / "before")
    nats_server.start()
    await eventually(lambda: all(one.delivery is not was for one, was in held.items()))
    await fleet.settled()
    assert len(fleet.work.named("OpenAttempt")) == len(dispatches)
    assert [chunk.results_seen for chunk in fleet.work.chunks.values()] == [1] * len(dispatches)


async def test_work_goes_on_when_the_broker_was_killed(
    fleet: Fleet, nats_server: NatsServer
) -> None:
    await fleet.start()
    await fleet.publish(fleet.work.add_chunk(lines(2), pool_id=POOL))
    await fleet.settled()
    nats_server.kill()
    nats_server.start()
    back = time.monotonic()
    again = fleet.work.add_chunk(lines(2), pool_id=POOL, first=10)

    async def published() -> bool:
        try:
            await fleet.publish(again)
        except buses.BusFault:
            return False
        return True

    await eventually(published)
    await eventually(lambda: fleet.work.chunks[again.chunk_id].done)
    assert time.monotonic() - back < 8


async def test_the_consumer_may_come_later(nats_server: NatsServer, tmp_path: Path) -> None:
    bus = await buses.connect(nats_server.url, "test")
    fleet = Fleet(bus, nats_server.url)
    await fleet.serve()
    try:
        await fleet.start()
        await eventually(lambda: fleet.work.named("RegisterExecutor"))
        await bus.ensure_streams()
        await bus.ensure_consumer(POOL)
        await fleet.publish(fleet.work.add_chunk(lines(1), pool_id=POOL))
        await eventually(lambda: all(one.done for one in fleet.work.chunks.values()))
    finally:
        await fleet.close()
        await bus.close()


async def test_a_consumer_that_is_made_anew_is_found_again(fleet: Fleet) -> None:
    await fleet.start()
    await fleet.publish(fleet.work.add_chunk(lines(1), pool_id=POOL))
    await fleet.settled()
    await fleet.bus._jetstream.delete_consumer("WORK", subjects.durable_of(POOL))
    again = fleet.work.add_chunk(lines(1), pool_id=POOL, first=1)
    await fleet.publish(again)
    await fleet.bus.ensure_consumer(POOL)
    await eventually(lambda: fleet.work.chunks[again.chunk_id].done, within_seconds=5)
