"""What every engine promises, as one suite; each engine's test class inherits it."""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from services.executor.engines.base import (
    Answer,
    Engine,
    EngineDead,
    EngineRequest,
    EngineResponse,
    RequestAborted,
)
from services.kit.wire.endpoints import CHAT_COMPLETIONS, COMPLETIONS
from tests.kit.eventually import eventually

_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A started engine and how to talk to it."""

    engine: Engine
    model: str
    endless: dict[str, Any]
    """Body fields with which a chat line runs until it is aborted, or nearly."""
    kill: Callable[[], Awaitable[None]]
    """End the engine's process, as a crash would."""
    refused: list[dict[str, Any]] = field(default_factory=list)
    """Chat bodies that this engine answers with 400, beside those that all do."""

    def chat(self, text: str = "hello night", **fields: Any) -> dict[str, Any]:
        """A small chat body."""
        messages = [{"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "max_tokens": 4, **fields}

    def request(
        self, body: dict[str, Any] | bytes | None = None, endpoint: str = CHAT_COMPLETIONS
    ) -> EngineRequest:
        """A first attempt with an id of its own."""
        raw = body if isinstance(body, bytes) else json.dumps(body or self.chat()).encode()
        request_id = f"{next(_numbers):032x}"
        return EngineRequest(endpoint, self.model, raw, request_id, 1, "batch_1", "a-project")

    def endless_requests(self, count: int) -> list[EngineRequest]:
        """Chat requests that stay in the engine."""
        return [self.request(self.chat(**self.endless)) for _ in range(count)]


async def settled(answer: Answer) -> EngineResponse:
    """The response, whether it came at once or not."""
    return answer if isinstance(answer, EngineResponse) else await answer


async def all_settled(answers: list[Answer]) -> list[EngineResponse | BaseException]:
    """Responses and what was raised, in order."""
    return await asyncio.gather(*map(settled, answers), return_exceptions=True)


def assert_envelope(response: EngineResponse, status: int = 400) -> dict[str, Any]:
    """The response is an error in OpenAI's envelope; returns its inside."""
    assert response.status == status, response
    body = orjson.loads(response.body)
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert isinstance(error["param"], str | None)
    assert isinstance(error["code"], str | None)
    assert response.usage.input_tokens == response.usage.output_tokens == 0
    return error


class EngineContract:
    """Inherit, and provide a fixture `subject`."""

    async def test_answers_a_chat_line(self, subject: Subject) -> None:
        request = subject.request()
        response = await subject.engine.submit(request)
        body = orjson.loads(response.body)
        assert response.status == 200
        assert b"\n" not in response.body
        assert body["object"] == "chat.completion"
        assert body["model"] == subject.model
        assert request.request_id in body["id"]
        assert isinstance(body["choices"][0]["message"]["content"], str)
        assert response.usage.input_tokens == body["usage"]["prompt_tokens"] > 0
        assert response.usage.output_tokens == body["usage"]["completion_tokens"] > 0
        assert subject.engine.in_flight == 0

    async def test_answers_a_completion_line(self, subject: Subject) -> None:
        body = {"model": subject.model, "prompt": ["one", "two"], "max_tokens": 2, "n": 2}
        response = await subject.engine.submit(subject.request(body, COMPLETIONS))
        choices = orjson.loads(response.body)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert all(isinstance(choice["text"], str) for choice in choices)

    async def test_answers_many_in_order_and_more_than_it_has_seats(self, subject: Subject) -> None:
        requests = [subject.request() for _ in range(3 * subject.engine.seats)]
        answers = await all_settled(subject.engine.submit_many(requests))
        assert len(answers) == len(requests)
        for request, response in zip(requests, answers, strict=True):
            assert isinstance(response, EngineResponse)
            assert response.status == 200
            assert request.request_id in orjson.loads(response.body)["id"]

    async def test_says_what_it_is(self, subject: Subject) -> None:
        engine = subject.engine
        assert engine.seats > 0
        assert {CHAT_COMPLETIONS, COMPLETIONS} <= engine.endpoints
        assert len(engine.revision) == 16
        assert engine.context_length is None or engine.context_length > 0
        engine.check_health()

    async def test_refuses_bad_bodies_and_serves_their_neighbours(self, subject: Subject) -> None:
        chat = subject.chat
        bad = [
            chat(max_tokens=-1),
            chat(max_tokens=0),
            chat(temperature="hot"),
            chat(temperature=2.1),
            chat(n=0),
            chat() | {"messages": []},
            chat() | {"messages": "hello"},
            {"model": subject.model},
            *subject.refused,
        ]
        requests = [subject.request(body) for each in bad for body in (each, chat())]
        answers = await all_settled(subject.engine.submit_many(requests))
        for response in answers[0::2]:
            assert isinstance(response, EngineResponse)
            assert_envelope(response)
        for response in answers[1::2]:
            assert isinstance(response, EngineResponse)
            assert response.status == 200

    @pytest.mark.parametrize(
        "raw",
        [
            b'{"model":"m","messages":[{"role":"user","content":"cut \\ud83d emoji"}]}',
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"other":"\\uD83D"}',
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"top_p":NaN}',
            b'{"model":"m","messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        ],
        ids=["surrogate", "surrogate in an unknown field", "NaN", "depth"],
    )
    async def test_refuses_what_is_no_text_or_json(self, subject: Subject, raw: bytes) -> None:
        assert_envelope(await subject.engine.submit(subject.request(raw)))

    @pytest.mark.parametrize(
        ("param", "fields"),
        [
            (None, {"messages": [{}] * 200_000}),
            ("messages", {"messages": [{}] * 2_049}),
            ("tools", {"tools": [{}] * 2_049}),
            ("n", {"n": 129}),
            ("structured_outputs", {"structured_outputs": {"choice": ["night"] * 4_097}}),
            ("chat_template", {"chat_template": "{{ 1 / 0 }}"}),
        ],
    )
    async def test_refuses_what_is_too_much_before_it_costs(
        self, subject: Subject, param: str | None, fields: dict[str, Any]
    ) -> None:
        began = time.thread_time()
        response = await subject.engine.submit(subject.request(subject.chat() | fields))
        # The loop's own work: it was 30 s for the first of them.
        assert time.thread_time() - began < 2
        assert assert_envelope(response)["param"] == param

    async def test_is_not_steered_by_the_body(self, subject: Subject) -> None:
        body = subject.chat(
            priority=-5,
            request_id="mine",
            stream=True,
            stream_options={"include_usage": True},
            cache_salt="mine",
            chat_template_kwargs={"chat_template": "{{ 1 / 0 }}"},
            kv_transfer_params={"do_remote_decode": True},
        )
        request = subject.request(body)
        response = await subject.engine.submit(request)
        assert response.status == 200
        assert request.request_id in orjson.loads(response.body)["id"]

    async def test_what_is_aborted_is_no_result(self, subject: Subject) -> None:
        engine = subject.engine
        running = subject.endless_requests(engine.seats)
        queued = [*subject.endless_requests(3), subject.request()]
        answers = engine.submit_many([*running, *queued])
        assert engine.in_flight == len(running) + len(queued)
        await asyncio.sleep(0.05)  # into the engine, or not: both are aborted alike
        ids = [request.request_id for request in [*queued, *running]]
        await engine.abort(ids)
        await engine.abort([*ids, "f" * 32])
        assert engine.in_flight == 0
        outcomes = await all_settled(answers)
        assert {type(outcome) for outcome in outcomes} == {RequestAborted}
        assert (await engine.submit(subject.request())).status == 200

    async def test_what_is_aborted_at_once_is_no_result(self, subject: Subject) -> None:
        requests = subject.endless_requests(2)
        answers = subject.engine.submit_many(requests)
        await subject.engine.abort(request.request_id for request in requests)
        outcomes = await all_settled(answers)
        assert {type(outcome) for outcome in outcomes} == {RequestAborted}

    async def test_an_abort_spares_the_others(self, subject: Subject) -> None:
        doomed, spared = subject.endless_requests(1)[0], subject.request()
        answers = subject.engine.submit_many([doomed, spared])
        await subject.engine.abort([doomed.request_id])
        outcomes = await all_settled(answers)
        assert isinstance(outcomes[0], RequestAborted)
        assert isinstance(outcomes[1], EngineResponse)
        await subject.engine.abort([spared.request_id])  # finished: ignored

    async def test_a_cancelled_awaitable_leaves_the_engine(self, subject: Subject) -> None:
        waiting = asyncio.ensure_future(subject.engine.submit(subject.endless_requests(1)[0]))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await eventually(lambda: subject.engine.in_flight == 0)
        assert waiting.cancelled()

    async def test_does_not_stall_while_it_steps_or_idles(self, subject: Subject) -> None:
        before = subject.engine.last_step_at
        await subject.engine.submit(subject.request())
        await eventually(lambda: subject.engine.last_step_at > before)
        assert subject.engine.stalled_seconds() == 0

    async def test_death_reaches_all_in_flight_and_a_new_start_helps(
        self, subject: Subject
    ) -> None:
        engine = subject.engine
        # One seat is free, for a line that kills.
        requests = subject.endless_requests(engine.seats - 1)
        answers = engine.submit_many(requests)
        await asyncio.sleep(0.05)
        await subject.kill()
        outcomes = await all_settled(answers)
        assert {type(outcome) for outcome in outcomes} == {EngineDead}
        await eventually(lambda: engine.in_flight == 0)
        with pytest.raises(EngineDead):
            engine.check_health()
        late = await all_settled(engine.submit_many([subject.request()]))
        assert [type(outcome) for outcome in late] == [EngineDead]
        await engine.abort(request.request_id for request in requests)
        await engine.start()
        engine.check_health()
        assert (await engine.submit(subject.request())).status == 200
