"""The executor at its work, with the simulated engine."""

import asyncio
import time
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protos.nightshift.v1 import dispatch_pb2
from services.executor.chunks import opener
from services.executor.engines.simulated.engine import SimulatedEngine
from services.executor.lines import reporter
from services.kit.process import telemetry
from services.kit.wire.frames import FAILED_FLAG, FRAME_BYTES
from tests.kit.eventually import eventually
from tests.kit.executor_fleet import POOL, Fleet, fleet, lines
from tests.kit.scripted_store import chat_line

__all__ = ["fleet"]

pytestmark = pytest.mark.integration


async def test_chunks_are_run_and_acknowledged_when_durable(fleet: Fleet) -> None:
    dispatches = [fleet.work.add_chunk(lines(100), pool_id=POOL, first=100 * i) for i in range(5)]
    await fleet.publish(*dispatches)
    await fleet.start()
    await fleet.settled()
    for chunk in fleet.work.chunks.values():
        assert chunk.done
        assert chunk.results_seen == 100
        answer = chunk.answers()["id-7"]
        assert list(answer) == ["id", "custom_id", "response", "error"]
        assert answer["response"]["status_code"] == 200
        assert len(answer["response"]["request_id"]) == 32
        record = chunk.records[chunk.dispatch.lines[0].first + 7]
        assert (record["input_tokens"], record["output_tokens"], record["flags"]) == (2, 1, 0)
    begun, registered = fleet.work.named("RegisterExecutor")
    # The new life is announced before the engine is ready, so that old attempts run elsewhere.
    assert not begun.models
    assert begun.incarnation == registered.incarnation
    assert registered.pool_id == POOL
    assert list(registered.models) == ["m"]


async def test_a_message_stays_until_the_store_has_made_its_results_durable(fleet: Fleet) -> None:
    fleet.work.acks.clear()
    dispatch = fleet.work.add_chunk(lines(3), pool_id=POOL)
    await fleet.publish(dispatch)
    executor = await fleet.start()
    await eventually(lambda: fleet.work.frames)
    # Two more beats: the attempt is alive, though no line of it is left to run.
    beats = len(fleet.work.named("Beat"))
    await eventually(lambda: len(fleet.work.named("Beat")) >= beats + 2)
    assert await fleet.unacked() == 1
    assert executor.attempts.held_lines == 0
    fleet.work.acks.set()
    await fleet.settled()


async def test_no_more_is_made_than_may_wait_for_the_store(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "MAX_PENDING_BYTES", 2_000)
    fleet.work.acks.clear()
    slow = [chat_line(f"line-{n}", x_simulate={"delay_ms": 20}) for n in range(10)]
    chunks = [fleet.work.add_chunk(slow, pool_id=POOL, first=10 * n) for n in range(20)]
    await fleet.publish(*chunks)
    executor = await fleet.start(engine=SimulatedEngine(seats=2))
    await eventually(lambda: executor.runner.answered >= 10)
    beats = len(fleet.work.named("Beat"))
    await eventually(lambda: len(fleet.work.named("Beat")) >= beats + 2)
    assert executor.runner.answered < 40
    fleet.work.acks.set()
    await eventually(lambda: all(chunk.done for chunk in fleet.work.chunks.values()))
    await fleet.settled()


async def test_a_one_line_chunk_does_not_wait_for_company(fleet: Fleet) -> None:
    await fleet.start()
    await eventually(lambda: fleet.work.named("RegisterExecutor"))
    took = []
    for index in range(5):
        dispatch = fleet.work.add_chunk(lines(1), pool_id=POOL, first=index)
        started = time.monotonic()
        await fleet.publish(dispatch)
        await eventually(
            lambda: all(one.done for one in fleet.work.chunks.values()), every_seconds=0.002
        )
        took.append(time.monotonic() - started)
    # One that waits does so each time; a busy machine now and then.
    assert min(took) < 0.5


async def test_failures_are_error_lines_and_passing_ones_run_again(fleet: Fleet) -> None:
    texts = [
        chat_line("ok"),
        chat_line("bad", temperature=9),
        chat_line("twice", x_simulate={"status": 500, "times": 2}),
        chat_line("always", x_simulate={"status": 500}),
        chat_line("busy", x_simulate={"status": 429, "times": 6}),
    ]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    await fleet.start()
    await fleet.settled()
    [chunk] = fleet.work.chunks.values()
    status = {name: one["response"]["status_code"] for name, one in chunk.answers().items()}
    assert status == {"ok": 200, "bad": 400, "twice": 200, "always": 500, "busy": 200}
    flags = [int(chunk.records[i]["flags"]) for i in range(5)]
    assert flags == [0, FAILED_FLAG, 0, FAILED_FLAG, 0]


async def test_a_line_that_takes_too_long_is_aborted_and_its_seat_is_free(fleet: Fleet) -> None:
    texts = [chat_line("stuck", x_simulate={"hang": True}), chat_line("next")]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    await fleet.start(engine=SimulatedEngine(seats=1), line_timeout_seconds=0.3)
    await fleet.settled()
    [chunk] = fleet.work.chunks.values()
    answers = chunk.answers()
    assert answers["stuck"]["response"] is None
    assert answers["stuck"]["error"]["code"] == "request_timeout"
    assert answers["next"]["response"]["status_code"] == 200
    assert int(chunk.records[0]["flags"]) == FAILED_FLAG


async def test_several_chunks_share_the_seats_and_earlier_ones_come_first(fleet: Fleet) -> None:
    texts = [lines(2, x_simulate={"delay_ms": 150}) for _ in range(3)]
    dispatches = [
        fleet.work.add_chunk(text, pool_id=POOL, first=2 * i) for i, text in enumerate(texts)
    ]
    await fleet.publish(*dispatches)
    executor = await fleet.start(engine=SimulatedEngine(seats=4))
    await eventually(lambda: executor.runner.in_flight == 4)
    started = {one.dispatch.chunk_id: one.started_lines() for one in executor.attempts}
    assert list(started.values())[:2] == [[0, 1], [2, 3]]
    await fleet.settled()


async def test_lines_and_results_above_a_frame_travel_in_pieces(fleet: Fleet) -> None:
    text = "x" * (2 * FRAME_BYTES)
    texts = [
        chat_line("long-in", text),
        chat_line("long-out", x_simulate={"output_bytes": 3 * FRAME_BYTES}),
        chat_line("short"),
    ]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    await fleet.start()
    await fleet.settled()
    [chunk] = fleet.work.chunks.values()
    content = chunk.answers()["long-out"]["response"]["body"]["choices"][0]["message"]["content"]
    assert len(content) == 3 * FRAME_BYTES
    assert chunk.done
    assert all(len(frame.payload) <= FRAME_BYTES for frame in fleet.work.frames)


async def test_room_is_said_at_once_and_repeated_in_the_bucket(fleet: Fleet) -> None:
    await fleet.start()
    ready = await eventually(
        lambda: [b for b in fleet.rooms if b.engine_state == dispatch_pb2.ENGINE_STATE_READY]
    )
    assert (ready[0].seats, ready[0].held_lines, ready[0].lines_per_second) == (64, 0, 0)
    assert 64 < ready[0].low_water < ready[0].high_water
    dispatch = fleet.work.add_chunk(lines(16), pool_id=POOL)
    await fleet.publish(dispatch)
    name = f"{dispatch.chunk_id}:1"
    await eventually(lambda: any(name in beat.opened for beat in fleet.rooms))
    # One chunk answered at once is enough to know a fast engine.
    fast = await eventually(lambda: [b for b in fleet.rooms if b.lines_per_second > 500])
    assert fast[0].high_water > 500

    async def in_bucket() -> bool:
        beats = await fleet.bus.beats()
        return any(b.lines_per_second > 500 and name in b.opened for b in beats)

    await eventually(in_bucket)


class QueueingEngine(SimulatedEngine):
    """A simulated engine that is given more lines than it has seats."""

    queue_ahead = 2


async def test_time_in_the_engines_own_queue_is_not_engine_time(fleet: Fleet) -> None:
    texts = [
        chat_line("stuck", x_simulate={"hang": True}),
        chat_line("behind", x_simulate={"delay_ms": 400}),
    ]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    executor = await fleet.start(engine=QueueingEngine(seats=1), line_timeout_seconds=0.6)
    await eventually(lambda: executor.runner.in_flight == 2)
    await fleet.settled()
    [chunk] = fleet.work.chunks.values()
    answers = chunk.answers()
    assert answers["stuck"]["error"]["code"] == "request_timeout"
    assert answers["behind"]["response"]["status_code"] == 200


async def test_a_chunk_is_a_span_of_its_batchs_trace(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(telemetry, "tracer", provider.get_tracer("test"))
    dispatch = fleet.work.add_chunk(lines(2), pool_id=POOL)
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    dispatch.traceparent = f"00-{trace_id}-{parent}-01"
    await fleet.publish(dispatch)
    await fleet.start()
    await fleet.settled()
    [span] = await eventually(kept.get_finished_spans)
    assert span.name == "run chunk"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == parent
    assert f"{span.context.trace_id:032x}" == trace_id
    assert span.attributes is not None
    assert span.attributes["nightshift.chunk"] == dispatch.chunk_id
    # The store's part of it hangs below the chunk.
    assert {name for name, seen in fleet.work.traces if trace_id in seen} >= {
        "OpenAttempt",
        "ReadLines",
    }
    provider.shutdown()


async def test_what_ended_while_it_waited_is_not_opened(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opener, "OPEN_AT_ONCE", 1)
    answered, enter = asyncio.Event(), fleet.work._enter

    async def slowly(name: str, request: Any, context: Any) -> None:
        await enter(name, request, context)
        if name == "OpenAttempt":
            await answered.wait()

    monkeypatch.setattr(fleet.work, "_enter", slowly)
    for batch_id in ("batch_a", "batch_b"):
        chunk = fleet.work.add_chunk(lines(1), pool_id=POOL, batch_id=batch_id)
        await fleet.publish(chunk)
    executor = await fleet.start()
    [opened] = await eventually(lambda: fleet.work.named("OpenAttempt"))
    await eventually(lambda: len(executor.attempts) == 2)
    [waits] = [one for one in executor.attempts if one.dispatch.chunk_id != opened.chunk_id]
    leaving = asyncio.create_task(fleet.stop())
    await eventually(lambda: waits.closed)
    answered.set()
    await leaving
    assert [one.chunk_id for one in fleet.work.named("OpenAttempt")] == [opened.chunk_id]


@pytest.mark.slow
async def test_results_are_kept_however_often_a_stream_breaks_under_them(fleet: Fleet) -> None:
    """While many are on their way gRPC itself hides why: it looks like a refusal of them."""
    fleet.work.break_streams = 6
    texts = lines(24, x_simulate={"output_bytes": 1_000_000})
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    await fleet.start()
    await fleet.settled(30)
    [chunk] = fleet.work.chunks.values()
    assert chunk.done
    assert len(fleet.work.named("OpenAttempt")) == 1
    assert fleet.work.named("HandBack") == []
