"""vLLM on a tiny model keeps the promises of the seam. One engine for all of these tests."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import pytest_asyncio

from services.executor.engines.base import (
    EngineRequest,
    EngineResponse,
    EngineStartError,
    RequestAborted,
)
from services.executor.engines.vllm.engine import VllmEngine
from services.kit.wire.endpoints import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS, RESPONSES
from tests.kit.engine_contract import EngineContract, Subject, all_settled, assert_envelope
from tests.kit.eventually import eventually
from tests.kit.tiny_model import CONTEXT_LENGTH, END_TOKEN

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    # A start takes 15 to 40 s on two cores, most of it imports in three processes.
    pytest.mark.timeout(240),
    # vLLM and torch warn of their own deprecations.
    pytest.mark.filterwarnings("ignore"),
]

SEATS = 8
NIGHT = {"type": "string", "enum": ["night"]}


def engine_processes() -> list[psutil.Process]:
    """vLLM's processes below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            found += [process] if "VLLM::" in " ".join(process.cmdline()) else []
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def subject(tiny_model: Path) -> AsyncIterator[Subject]:
    engine = VllmEngine(
        model=str(tiny_model),
        served_name="tiny",
        engine_args=["--max-num-seqs", str(SEATS)],
        # More than the model's context: a default is never a reason to refuse.
        default_max_tokens=10 * CONTEXT_LENGTH,
    )
    await engine.start()

    async def kill() -> None:
        [core] = [p for p in engine_processes() if "EngineCore" in " ".join(p.cmdline())]
        core.kill()

    yield Subject(
        engine=engine,
        model="tiny",
        endless={"max_tokens": 1_900, "ignore_eos": True},
        kill=kill,
        refused=[
            {"model": "tiny", "messages": [{"content": "no role"}]},
            {"model": "tiny", "messages": [{"role": "user", "content": "w " * 5_000}]},
        ],
    )
    await engine.close()


class TestVllm(EngineContract):
    """The vLLM engine."""

    async def test_tells_seats_context_and_endpoints(self, subject: Subject) -> None:
        assert subject.engine.seats == SEATS
        assert subject.engine.context_length == CONTEXT_LENGTH
        assert subject.engine.endpoints == {CHAT_COMPLETIONS, COMPLETIONS, RESPONSES}

    async def test_a_seeded_prompt_longer_than_a_step_does_not_kill(self, subject: Subject) -> None:
        # With chunked prefill, vLLM 0.32 on a CPU dies of these.
        bodies = [
            subject.chat(f"w{name} " * 400, seed=3, temperature=1.0, max_tokens=2)
            for name in range(3 * SEATS)
        ]
        answers = await all_settled(subject.engine.submit_many(list(map(subject.request, bodies))))
        assert [getattr(answer, "status", answer) for answer in answers] == [200] * len(bodies)
        usage = [answer.usage for answer in answers if isinstance(answer, EngineResponse)]
        assert sum(counts.input_tokens for counts in usage) > 4 * 4_096

    async def test_a_default_beyond_the_context_ends_with_it(self, subject: Subject) -> None:
        for asked in ({}, {"max_completion_tokens": 3}):
            body = subject.chat(max_tokens=None, ignore_eos=True, **asked)
            response = await subject.engine.submit(subject.request(body))
            usage = response.usage
            most = asked.get("max_completion_tokens", CONTEXT_LENGTH - usage.input_tokens)
            assert (response.status, usage.output_tokens) == (200, most)

    async def test_counts_cached_tokens(self, subject: Subject) -> None:
        prefix = "a batch of requests waits for the night " * 60
        for _ in range(2):
            response = await subject.engine.submit(subject.request(subject.chat(prefix)))
        assert 0 < response.usage.cached_tokens < response.usage.input_tokens

    async def test_log_probabilities_are_strict_json(self, subject: Subject) -> None:
        asked: list[dict[str, Any]] = [
            {"temperature": 1, "top_k": 1},
            {"temperature": 0, "logit_bias": {"1": -100}},
        ]
        for fields in asked:
            body = subject.chat(logprobs=True, top_logprobs=5, **fields)
            response = await subject.engine.submit(subject.request(body))
            choice = orjson.loads(response.body)["choices"][0]  # refuses -Infinity
            assert len(choice["logprobs"]["content"]) > 0

    async def test_constrained_output_is_what_was_asked(self, subject: Subject) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": NIGHT}}
        body = subject.chat(max_tokens=30, response_format=schema)
        response = await subject.engine.submit(subject.request(body))
        assert orjson.loads(response.body)["choices"][0]["message"]["content"] == '"night"'

    async def test_an_answer_of_no_text_is_an_answer(self, subject: Subject) -> None:
        ends_at_once = {"logit_bias": {str(END_TOKEN): 100}, "max_tokens": 30}
        response = await subject.engine.submit(subject.request(subject.chat(**ends_at_once)))
        [choice] = orjson.loads(response.body)["choices"]
        assert (response.status, response.usage.output_tokens) == (200, 1)
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")

    async def test_refusals_say_what_is_wrong(self, subject: Subject) -> None:
        async def refused(body: dict[str, Any], status: int = 400) -> dict[str, Any]:
            request = subject.request(body)
            return assert_envelope(await subject.engine.submit(request), status)

        assert (await refused({"model": "tiny"}))["param"] == "messages"
        assert (await refused(subject.chat(temperature="hot")))["param"] == "temperature"
        assert (await refused(subject.chat(max_tokens=-1)))["param"] == "max_tokens"
        too_long = await refused(subject.chat("w " * 5_000))
        assert too_long["code"] == "context_length_exceeded"
        assert "parameter=" not in too_long["message"]
        schema = {"name": "x", "schema": {"type": "nonsense"}}
        fields = {"response_format": {"type": "json_schema", "json_schema": schema}}
        assert "rammar" in (await refused(subject.chat(**fields)))["message"]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        assert "tool" in (await refused(subject.chat(tools=tools)))["message"]
        media = [{"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": media}]}
        assert "data:" in (await refused(body))["message"]

    @pytest.mark.parametrize(
        ("endpoint", "fields"),
        [
            # Within the bounds, and wrong in each of the ways that an entry may be meant: 0.4 to
            # 5 s where all faults are collected.
            (CHAT_COMPLETIONS, {"messages": [dict.fromkeys(map(str, range(20)), 1)] * 2_048}),
            (RESPONSES, {"input": [{"type": "reasoning"}] * 2_048}),
            (COMPLETIONS, {"prompt": [-1] * 300_000}),
        ],
    )
    async def test_many_faults_cost_as_little_as_one(
        self, subject: Subject, endpoint: str, fields: dict[str, Any]
    ) -> None:
        request = subject.request({"model": "tiny", **fields}, endpoint)
        began = time.thread_time()
        response = await subject.engine.submit(request)
        assert time.thread_time() - began < 0.3
        assert assert_envelope(response)["param"] in fields

    async def test_responses(self, subject: Subject) -> None:
        # What random weights say by chance may be no text at all; this says what it must.
        text = {"format": {"type": "json_schema", "name": "x", "schema": NIGHT}}
        body = {"model": "tiny", "input": "hello", "max_output_tokens": 30, "text": text}
        request = subject.request({**body, "store": True, "background": True}, RESPONSES)
        response = await subject.engine.submit(request)
        found = orjson.loads(response.body)
        assert response.status == 200, found
        assert (found["object"], found["id"]) == ("response", f"resp_{request.request_id}")
        assert found["status"] == "completed"
        assert found["usage"]["output_tokens"] == response.usage.output_tokens > 0
        [message] = found["output"]
        [part] = message["content"]
        assert (part["type"], part["text"]) == ("output_text", '"night"')
        bad = subject.request({**body, "max_output_tokens": "many"}, RESPONSES)
        assert_envelope(await subject.engine.submit(bad))

    async def test_refuses_models_and_endpoints_it_has_not(self, subject: Subject) -> None:
        raw = orjson.dumps(subject.chat())
        unknown = EngineRequest(CHAT_COMPLETIONS, "other", raw, "e" * 32, 1)
        error = assert_envelope(await subject.engine.submit(unknown), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        body = {"model": "tiny", "input": "x"}
        assert_envelope(await subject.engine.submit(subject.request(body, EMBEDDINGS)))

    async def test_a_bad_argument_is_named_and_leaves_nothing(self, subject: Subject) -> None:
        before = {process.pid for process in engine_processes()}
        for model, arguments in (("/nowhere/at-all", []), ("x", ["--no-such-flag"])):
            engine = VllmEngine(model=model, served_name="x", engine_args=arguments)
            with pytest.raises(EngineStartError):
                await engine.start()
        assert {process.pid for process in engine_processes()} == before


async def test_close_aborts_and_leaves_no_process(subject: Subject) -> None:
    answers = subject.engine.submit_many(subject.endless_requests(2 * SEATS))
    await asyncio.sleep(0.05)
    await subject.engine.close()
    outcomes = await all_settled(answers)
    assert {type(outcome) for outcome in outcomes} == {RequestAborted}
    await eventually(lambda: not engine_processes())
    await subject.engine.close()


async def test_a_start_that_is_cancelled_ends_soon_and_leaves_no_process(tiny_model: Path) -> None:
    engine = VllmEngine(model=str(tiny_model), served_name="tiny", engine_args=[])
    starting = asyncio.create_task(engine.start())
    await eventually(engine_processes, within_seconds=60)

    # A draining executor cancels twice; the second must not cut the clearing up short.
    starting.cancel()
    await asyncio.sleep(0)
    starting.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert engine_processes() == []
