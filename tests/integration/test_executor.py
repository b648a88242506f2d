"""The executor over a real nats-server and a real gRPC socket, with the simulated engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protos.nightshift.v1 import dispatch_pb2, work_pb2
from services.executor.engines.base import Answer, EngineRequest
from services.executor.engines.simulated import SimulatedEngine
from services.executor.executor import Executor, Identity
from services.executor.store_client import StoreClient
from services.kit import bus as buses
from services.kit import rpc, telemetry
from services.kit.clock import SystemClock
from services.kit.frames import FAILED_FLAG, FRAME_BYTES
from services.kit.ids import pool_id_of
from tests.kit.eventually import eventually
from tests.kit.nats_server import NatsServer
from tests.kit.scripted_store import SECRET, ScriptedWork, chat_line, start_scripted_store

pytestmark = pytest.mark.integration

POOL = pool_id_of("m")


class Fleet:
    """A scripted store, a bus and executors."""

    def __init__(self, bus: buses.Bus, nats_url: str) -> None:
        self.bus = bus
        self.nats_url = nats_url
        self.work = ScriptedWork()
        self.server: rpc.RunningServer | None = None
        self.rooms: list[dispatch_pb2.ExecutorBeat] = []
        self._closers: list[asyncio.Task[None]] = []
        self._stops: list[asyncio.Event] = []

    async def serve(self, listen: str = "127.0.0.1:0") -> None:
        self.server = await start_scripted_store(self.work, listen)

    @property
    def address(self) -> str:
        assert self.server is not None
        return f"127.0.0.1:{self.server.port}"

    async def start(
        self,
        *,
        engine: SimulatedEngine | None = None,
        name: str = "executor-0",
        line_timeout_seconds: float = 60.0,
        drain_seconds: float = 5.0,
        stall_limit_seconds: float = 60.0,
    ) -> Executor:
        bus = await buses.connect(self.nats_url, name)
        channel = rpc.open_channel(self.address)
        stop = asyncio.Event()

        async def on_ready(_ready: bool) -> None:
            return None

        executor = Executor(
            Identity(
                executor_id=name,
                pool_id=POOL,
                models=("m",),
                line_timeout_seconds=line_timeout_seconds,
                drain_seconds=drain_seconds,
                stall_limit_seconds=stall_limit_seconds,
            ),
            engine=engine or SimulatedEngine(),
            bus=bus,
            store=StoreClient(channel, secret=SECRET, executor_id=name, incarnation="1"),
            clock=SystemClock(),
            chance=lambda: 0.0,
            on_ready=on_ready,
        )

        async def live() -> None:
            try:
                await executor.run(stop)
            finally:
                await bus.close()
                await channel.close()

        self._closers.append(asyncio.create_task(live()))
        self._stops.append(stop)
        return executor

    async def stop(self, index: int = 0) -> None:
        self._stops[index].set()
        await self._closers[index]

    async def close(self) -> None:
        for stop in self._stops:
            stop.set()
        await asyncio.gather(*self._closers)
        if self.server is not None:
            await self.server.drain(0)

    async def publish(self, *dispatches: dispatch_pb2.Dispatch) -> None:
        for dispatch in dispatches:
            await self.bus.publish_dispatch(dispatch)

    async def unacked(self) -> int:
        """Messages of the pool that are not dealt with."""
        info = await self.bus._jetstream.consumer_info("WORK", buses.durable_of(POOL))
        return (info.num_pending or 0) + (info.num_ack_pending or 0)

    async def settled(self, within_seconds: float = 10.0) -> None:
        async def none_left() -> bool:
            return await self.unacked() == 0

        await eventually(none_left, within_seconds=within_seconds)


@pytest.fixture
async def fleet(nats_server: NatsServer) -> AsyncIterator[Fleet]:
    bus = await buses.connect(nats_server.url, "test")
    await bus.ensure_streams()
    await bus.ensure_consumer(POOL)
    fleet = Fleet(bus, nats_server.url)
    await fleet.serve()

    async def heard(beat: dispatch_pb2.ExecutorBeat) -> None:
        fleet.rooms.append(beat)

    await bus.on_room(heard)
    # A subscription counts once the broker has seen it.
    await bus._client.flush()
    yield fleet
    await fleet.close()
    await bus.close()


def lines(count: int, **body: object) -> list[bytes]:
    return [chat_line(f"id-{i}", f"hello {i}", **body) for i in range(count)]


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


async def test_a_one_line_chunk_does_not_wait_for_company(fleet: Fleet) -> None:
    await fleet.start()
    await eventually(lambda: fleet.work.named("RegisterExecutor"))
    for index in range(5):
        dispatch = fleet.work.add_chunk(lines(1), pool_id=POOL, first=index)
        started = time.monotonic()
        await fleet.publish(dispatch)
        await eventually(
            lambda: all(one.done for one in fleet.work.chunks.values()), every_seconds=0.002
        )
        assert time.monotonic() - started < 0.5


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


async def test_unacknowledged_frames_are_sent_again_on_a_new_stream(fleet: Fleet) -> None:
    fleet.work.break_streams = 2
    await fleet.publish(fleet.work.add_chunk(lines(5), pool_id=POOL))
    await fleet.start()
    await fleet.settled()
    [chunk] = fleet.work.chunks.values()
    assert chunk.done
    assert len(fleet.work.named("AppendResults")) == 3


async def test_gone_is_dropped_and_busy_comes_back_later(fleet: Fleet) -> None:
    gone = fleet.work.add_chunk(lines(1), pool_id=POOL)
    busy = fleet.work.add_chunk(lines(1), pool_id=POOL, first=1)
    fleet.work.outcomes = {
        gone.chunk_id: [
            work_pb2.OpenAttemptResponse(gone=work_pb2.AttemptGone(reason="superseded"))
        ],
        busy.chunk_id: [
            work_pb2.OpenAttemptResponse(busy=work_pb2.AttemptBusy(retry_after_ms=200))
        ],
    }
    await fleet.publish(gone, busy)
    await fleet.start()
    await fleet.settled()
    assert not fleet.work.chunks[gone.chunk_id].results
    assert fleet.work.chunks[busy.chunk_id].done
    opened = [one.chunk_id for one in fleet.work.named("OpenAttempt")]
    assert sorted(opened) == sorted([gone.chunk_id, busy.chunk_id, busy.chunk_id])


@pytest.mark.parametrize("how", ["BATCH_CANCELLING", "BATCH_EXPIRING", "beat"])
async def test_a_cancelled_batch_leaves_the_engine_and_keeps_what_is_finished(
    fleet: Fleet, how: str
) -> None:
    texts = [chat_line("done"), chat_line("slow", x_simulate={"delay_ms": 60_000})]
    await fleet.publish(fleet.work.add_chunk([*texts, *lines(3)], pool_id=POOL))
    other = fleet.work.add_chunk(
        [chat_line("other", x_simulate={"delay_ms": 1_500})], pool_id=POOL, batch_id="batch_b"
    )
    await fleet.publish(other)
    executor = await fleet.start(engine=SimulatedEngine(seats=2))
    await eventually(lambda: executor.runner.in_flight == 2)
    [token] = [token for token in fleet.work.tokens if not token.startswith(other.chunk_id)]
    started = time.monotonic()
    if how != "beat":
        kind = dispatch_pb2.EventKind.Value(f"EVENT_KIND_{how}")
        event = dispatch_pb2.Event(kind=kind, batch_id="batch_a", pool_id=POOL)
        await fleet.bus.publish_event(
            buses.event_subject(event), event.SerializeToString(), "outbox-1"
        )
    else:
        fleet.work.drops[token] = work_pb2.DROP_REASON_CANCELLED
    await eventually(lambda: executor.runner.in_flight == 1)
    assert time.monotonic() - started < (1.6 if how == "beat" else 0.5)
    await eventually(lambda: fleet.work.named("HandBack"))
    assert list(fleet.work.named("HandBack")[0].tokens) == [token]
    await fleet.settled()
    results = fleet.work.tokens[token].answers()
    # The aborted line's answer is nobody's result; what was finished before is kept.
    assert "slow" not in results
    assert "done" in results
    assert fleet.work.chunks[other.chunk_id].done


async def test_a_superseded_attempt_neither_acknowledges_nor_hands_back(fleet: Fleet) -> None:
    texts = [chat_line("slow", x_simulate={"delay_ms": 60_000})]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    executor = await fleet.start()
    await eventually(lambda: executor.runner.in_flight == 1)
    [token] = fleet.work.tokens
    fleet.work.drops[token] = work_pb2.DROP_REASON_SUPERSEDED
    await eventually(lambda: not len(executor.attempts))
    assert executor.runner.in_flight == 0
    assert await fleet.unacked() == 1
    assert not fleet.work.named("HandBack")


async def test_a_sealed_batch_is_dropped(fleet: Fleet) -> None:
    fleet.work.sealed.add("batch_a")
    texts = [*lines(2), chat_line("slow", x_simulate={"delay_ms": 60_000})]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    executor = await fleet.start()
    await eventually(lambda: fleet.work.frames)
    await fleet.settled()
    assert executor.runner.in_flight == 0
    assert not fleet.work.named("HandBack")


async def test_a_dead_engine_names_its_suspects_and_starts_again(fleet: Fleet) -> None:
    texts = [
        chat_line("before"),
        chat_line("poison", x_simulate={"delay_ms": 200, "crash": True}),
        chat_line("bystander", x_simulate={"delay_ms": 60_000}),
        chat_line("waiting", x_simulate={"delay_ms": 60_000}),
    ]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    untouched = fleet.work.add_chunk(lines(2), pool_id=POOL, first=10)
    await fleet.publish(untouched)
    executor = await fleet.start(engine=SimulatedEngine(seats=2))
    await eventually(lambda: fleet.work.named("ReportDeath"))
    [report] = fleet.work.named("ReportDeath")
    [suspects] = report.attempts
    assert [(part.first, part.count) for part in suspects.started] == [(1, 2)]
    # The report comes after what was finished is safe.
    assert list(fleet.work.tokens[suspects.token].answers()) == ["before"]
    await eventually(lambda: executor.presence.ready)
    # The store hands both out again.
    fresh = fleet.work.add_chunk(lines(2), pool_id=POOL, first=20)
    await fleet.publish(fresh)
    await eventually(lambda: fleet.work.chunks[fresh.chunk_id].done)
    states = [beat.engine_state for beat in fleet.rooms]
    assert dispatch_pb2.ENGINE_STATE_DEAD in states
    assert states[-1] == dispatch_pb2.ENGINE_STATE_READY
    await fleet.settled()


async def test_an_engine_that_makes_no_step_is_dead(fleet: Fleet) -> None:
    texts = [chat_line("stuck", x_simulate={"hang": "engine"}), *lines(2)]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    executor = await fleet.start(stall_limit_seconds=0.5)
    [report] = await eventually(lambda: fleet.work.named("ReportDeath"))
    assert "no step" in report.reason
    await eventually(lambda: executor.presence.ready)


async def test_suspects_have_the_engine_to_themselves(fleet: Fleet) -> None:
    slow = fleet.work.add_chunk(
        [chat_line("slow", x_simulate={"delay_ms": 700})], pool_id=POOL, first=0
    )
    alone = fleet.work.add_chunk(
        [chat_line("suspect", x_simulate={"delay_ms": 300, "crash": 2})],
        pool_id=POOL,
        first=1,
        alone=True,
        deaths=2,
    )
    later = fleet.work.add_chunk(lines(3), pool_id=POOL, first=2)
    await fleet.publish(slow)
    executor = await fleet.start()
    await eventually(lambda: executor.runner.in_flight == 1)
    await fleet.publish(alone, later)
    order: list[str] = []

    def all_done() -> bool:
        for chunk in fleet.work.chunks.values():
            if chunk.done and chunk.dispatch.chunk_id not in order:
                order.append(chunk.dispatch.chunk_id)
        return len(order) == 3

    await eventually(all_done)
    assert order == [slow.chunk_id, alone.chunk_id, later.chunk_id]
    # The third run of a line that kills twice: its attempt number is its deaths and one.
    assert not fleet.work.named("ReportDeath")
    await fleet.settled()


async def test_draining_finishes_what_runs_and_gives_the_rest_back(fleet: Fleet) -> None:
    texts = [
        chat_line("runs", x_simulate={"delay_ms": 400}),
        chat_line("waits", x_simulate={"delay_ms": 400}),
    ]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    executor = await fleet.start(engine=SimulatedEngine(seats=1))
    await eventually(lambda: executor.runner.in_flight == 1)
    await fleet.stop()
    [chunk] = fleet.work.chunks.values()
    assert list(chunk.answers()) == ["runs"]
    [handed] = fleet.work.named("HandBack")
    assert list(handed.tokens) == list(fleet.work.tokens)
    assert [beat.executor_id for beat in await fleet.bus.beats()] == []
    # Another one goes on at once.
    await fleet.start(name="executor-1")
    await eventually(lambda: chunk.done, within_seconds=3)
    await fleet.settled()


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
    assert time.monotonic() - back < 3
    await fleet.settled()


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
    assert time.monotonic() - back < 4


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


class ChokingEngine(SimulatedEngine):
    """A simulated engine whose adapter fails on one of its lines."""

    def submit_many(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        if any(b"choke" in request.body for request in requests):
            raise RuntimeError("unforeseen")
        return super().submit_many(requests)


async def test_a_line_that_an_adapter_chokes_on_fails_alone(fleet: Fleet) -> None:
    texts = [*lines(3), chat_line("bad", "choke"), chat_line("good")]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    await fleet.start(engine=ChokingEngine())
    await fleet.settled()
    [chunk] = fleet.work.chunks.values()
    status = {name: one["response"]["status_code"] for name, one in chunk.answers().items()}
    assert status == {"id-0": 200, "id-1": 200, "id-2": 200, "bad": 500, "good": 200}


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


async def test_a_consumer_that_is_made_anew_is_found_again(fleet: Fleet) -> None:
    await fleet.start()
    await fleet.publish(fleet.work.add_chunk(lines(1), pool_id=POOL))
    await fleet.settled()
    await fleet.bus._jetstream.delete_consumer("WORK", buses.durable_of(POOL))
    again = fleet.work.add_chunk(lines(1), pool_id=POOL, first=1)
    await fleet.publish(again)
    await fleet.bus.ensure_consumer(POOL)
    await eventually(lambda: fleet.work.chunks[again.chunk_id].done, within_seconds=5)
