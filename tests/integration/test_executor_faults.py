"""The executor when work or its engine ends: batches, attempts, lines, processes."""

import time
from collections.abc import Sequence
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg

from protos.nightshift.v1 import dispatch_pb2, work_pb2
from services.executor import executor as executors
from services.executor.chunks import endings, keep_alive, opener
from services.executor.engines.base import Answer, EngineRequest
from services.executor.engines.simulated.engine import SimulatedEngine
from services.executor.engines.simulated.started_log import StartedFile
from services.executor.lines import reporter
from services.kit.messages.subjects import event_subject
from tests.kit.eventually import eventually
from tests.kit.executor_fleet import POOL, Fleet, fleet, lines
from tests.kit.scripted_store import chat_line
from tests.kit.started_lines import executions, read_started

__all__ = ["fleet"]

pytestmark = [pytest.mark.integration, pytest.mark.slow]


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
    fleet: Fleet, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how != "beat":
        # Nothing else tells it in time.
        monkeypatch.setattr(executors, "BEAT_SECONDS", 6.0)
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
        # Whoever says so on the bus only has the store asked, at once.
        beats = len(fleet.work.named("Beat"))
        await fleet.bus.publish_event(event_subject(event), event.SerializeToString(), "forged")
        await eventually(lambda: len(fleet.work.named("Beat")) > beats)
        assert executor.runner.in_flight == 2
        assert not fleet.work.named("HandBack")
    fleet.work.drops[token] = work_pb2.DROP_REASON_CANCELLED
    if how != "beat":
        await fleet.bus.publish_event(event_subject(event), event.SerializeToString(), "outbox-1")
    await eventually(lambda: executor.runner.in_flight == 1)
    assert time.monotonic() - started < 3
    await eventually(lambda: fleet.work.named("HandBack"))
    assert list(fleet.work.named("HandBack")[0].tokens) == [token]
    await fleet.settled()
    results = fleet.work.tokens[token].answers()
    # The aborted line's answer is nobody's result; what was finished before is kept.
    assert "slow" not in results
    assert "done" in results
    assert fleet.work.chunks[other.chunk_id].done


class NotingEngine(SimulatedEngine):
    """Notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[EngineRequest] = []

    def submit_many(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        self.asked += requests
        return super().submit_many(requests)


@pytest.mark.parametrize("older", [False, True])
async def test_lines_run_as_the_store_says_and_not_as_the_message_does(
    fleet: Fleet, *, older: bool
) -> None:
    """A store of the version before says nothing; the message counts then."""
    fleet.work.older = older
    true = fleet.work.add_chunk(lines(1), pool_id=POOL)
    forged = dispatch_pb2.Dispatch.FromString(true.SerializeToString())
    forged.model, forged.endpoint, forged.batch_id = "another", "/v1/embeddings", "batch_b"
    forged.alone, forged.line_count = True, 7
    await fleet.publish(forged)
    engine = NotingEngine()
    await fleet.start(engine=engine)
    await fleet.settled()
    said = forged if older else true
    [asked] = engine.asked
    assert (asked.model, asked.endpoint) == (said.model, said.endpoint)
    assert asked.batch_id == said.batch_id


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


async def test_what_was_kept_for_too_long_without_a_word_is_not_refused(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has given it to somebody else by then, who would lose it."""
    monkeypatch.setattr(endings, "ACK_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(keep_alive, "IN_PROGRESS_SECONDS", 60.0)
    said: list[bytes] = []

    async def note(message: Msg) -> None:
        said.append(message.data)

    client = await nats.connect(fleet.nats_url)
    await client.subscribe("$JS.ACK.WORK.>", cb=note)
    texts = [chat_line("slow", x_simulate={"delay_ms": 60_000})]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    executor = await fleet.start(drain_seconds=0.0)
    await eventually(lambda: executor.runner.in_flight == 1)
    until = time.monotonic() + 0.6
    await eventually(lambda: time.monotonic() > until)
    await fleet.stop()
    assert fleet.work.named("HandBack")
    await client.flush()
    assert said == []
    await client.close()


async def test_what_waited_to_be_opened_for_too_long_is_left_to_the_broker(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opener, "STALE_SECONDS", -1.0)
    dispatch = fleet.work.add_chunk(lines(2), pool_id=POOL)
    await fleet.publish(dispatch)
    executor = await fleet.start()
    name = f"{dispatch.chunk_id}:{dispatch.dispatch}"
    await eventually(lambda: any(name in beat.opened for beat in fleet.rooms))
    await eventually(lambda: not len(executor.attempts))
    assert fleet.work.named("OpenAttempt") == []
    assert await fleet.unacked() == 1


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
    assert "NIGHTSHIFT_EXECUTOR_STALL_SECONDS" in report.reason
    await eventually(lambda: executor.presence.ready)


async def test_a_hung_engine_times_no_line_out(fleet: Fleet) -> None:
    """Its lines are not to blame: they run again in a fresh one."""
    texts = [chat_line("stuck", x_simulate={"hang": "engine"}), *lines(2)]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    await fleet.start(line_timeout_seconds=0.4, stall_limit_seconds=1.5)
    [report] = await eventually(lambda: fleet.work.named("ReportDeath"))
    assert "no step" in report.reason
    assert not fleet.work.frames


async def test_a_process_that_was_stopped_times_no_line_out(fleet: Fleet) -> None:
    """What passes while it is frozen is not time that its lines had in the engine."""
    chunk = fleet.work.add_chunk(
        [chat_line("slow", x_simulate={"delay_ms": 3_500})], pool_id=POOL, first=0
    )
    await fleet.publish(chunk)
    executor = await fleet.start(line_timeout_seconds=2.0)
    await eventually(lambda: executor.runner.in_flight == 1)
    # Stands in for SIGSTOP: nothing of the process runs meanwhile.
    time.sleep(2.6)  # noqa: ASYNC251
    await fleet.settled()
    [chunk_done] = fleet.work.chunks.values()
    assert chunk_done.answers()["slow"]["response"]["status_code"] == 200


@pytest.mark.parametrize("taken", [False, True])
async def test_a_process_that_was_stopped_begins_no_line_before_it_asked(
    fleet: Fleet, tmp_path: Path, taken: bool
) -> None:
    """Others may have begun them by then: it goes on with what the store says is still its own."""
    texts = [chat_line(f"slow-{n}", x_simulate={"delay_ms": 500}) for n in range(6)]
    await fleet.publish(fleet.work.add_chunk(texts, pool_id=POOL))
    notes = StartedFile(tmp_path / "started", "executor-0.1")
    executor = await fleet.start(engine=SimulatedEngine(seats=2, started=notes))
    await eventually(lambda: executor.runner.in_flight == 2)
    [token] = fleet.work.tokens
    if taken:
        fleet.work.drops[token] = work_pb2.DROP_REASON_SUPERSEDED
    begun = executions(read_started(tmp_path / "started"))
    # Stands in for SIGSTOP: nothing of the process runs meanwhile.
    time.sleep(2.6)  # noqa: ASYNC251
    await eventually(lambda: not len(executor.attempts))
    now = executions(read_started(tmp_path / "started"))
    assert now == begun if taken else sorted(now.values()) == [1] * len(texts)


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
        opened = {request.chunk_id for request in fleet.work.named("OpenAttempt")}
        # Others may take it meanwhile.
        assert later.chunk_id not in opened or fleet.work.chunks[alone.chunk_id].done
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


async def test_a_result_that_the_store_refuses_costs_no_other_its_result(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line ends with the reason; in a store that takes not even that, its chunk comes again."""
    monkeypatch.setattr(reporter, "MAX_FAULTS", 3)
    refused = {"poison": b'"sim-', "worse": b"batch_req"}
    texts = [chat_line("poison"), *lines(3), chat_line("worse")]
    dispatch = fleet.work.add_chunk(texts, pool_id=POOL)
    other = fleet.work.add_chunk(lines(3), pool_id=POOL, batch_id="batch_b")

    def refuse(payload: bytes) -> Exception | None:
        bad = any(
            f'"{name}"'.encode() in line and what in line
            for line in payload.splitlines()
            for name, what in refused.items()
        )
        return ValueError("a bug") if bad else None

    fleet.work.refuse = refuse
    await fleet.publish(dispatch, other)
    await fleet.start()
    await eventually(lambda: fleet.work.named("HandBack"))
    (given_back,) = fleet.work.named("HandBack")
    reason = "the log names it"
    assert given_back.trouble.startswith("the store does not take its results (")
    assert reason in given_back.trouble
    chunk = fleet.work.chunks[dispatch.chunk_id]
    await eventually(lambda: len(chunk.results) == 4)
    assert fleet.work.chunks[other.chunk_id].done
    ends = {name: line["error"] for name, line in chunk.answers().items()}
    assert ends.pop("poison")["code"] == "result_refused"
    assert reason in chunk.answers()["poison"]["error"]["message"]
    assert ends == dict.fromkeys(("id-0", "id-1", "id-2"))
    # Handed out again, with nothing in the way, it ends.
    refused.clear()
    dispatch.dispatch = 2
    await fleet.publish(dispatch)
    await eventually(lambda: chunk.done)
    # Each line ran once but for the one that had no end.
    assert fleet.work.named("OpenAttempt")[-1].chunk_id == dispatch.chunk_id
    assert chunk.results_seen == 5


async def test_lines_that_make_no_sense_are_given_back_with_the_reason(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opener, "READ_TRIES", 2)
    fleet.work.spoilt_reads = 2
    dispatch = fleet.work.add_chunk(lines(2), pool_id=POOL)
    await fleet.publish(dispatch)
    await fleet.start()
    await eventually(lambda: fleet.work.named("HandBack"))
    (given_back,) = fleet.work.named("HandBack")
    assert given_back.trouble == "its lines cannot be read (bytes without a line)"
    await fleet.settled()
