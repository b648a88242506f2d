"""The whole system with vLLM for real: one `nightshift up` that serves a tiny and a small model."""

import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.e2e.killer import LINES, lines_with_a_killer
from tests.kit.batches import Json, Outcome, Watch, chat, ended, ids, outcome, submit
from tests.kit.eventually import eventually
from tests.kit.up import RunningUp, running_up

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    # Two engines start at once, which takes up to a minute on two cores.
    pytest.mark.timeout(240),
]

SEATS = 8
START_SECONDS = 180
IDLE_SECONDS = 0.3
"""An engine whose processes use no processor for this long is at rest."""
SECONDS_TO_STOP = 2
"""How long an engine may compute for a batch that was cancelled; its lines would take a minute."""
TINY, SMALL = "tiny", "smollm2-135m"


@pytest.fixture(scope="module")
def system(
    tiny_model: Path, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningUp]:
    """Serve both models, with an executor each."""
    arguments = [
        *("--model", f"{TINY}={tiny_model}", "--model", f"{SMALL}={small_model}"),
        *("--engine-args", f"{TINY}: --max-num-seqs {SEATS}"),
    ]
    with running_up(tmp_path_factory.mktemp("e2e") / "data", arguments) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(system: RunningUp) -> AsyncIterator[AsyncOpenAI]:
    """The official client, as a user makes it."""
    async with AsyncOpenAI(base_url=system.base_url, api_key="anything") as official:
        yield official


def tiny(custom_id: str, text: str = "the quick brown fox", **fields: Any) -> Json:
    """A chat line for the tiny model."""
    return chat(custom_id, text, TINY, **{"max_tokens": 16, "temperature": 0, **fields})


async def run(client: AsyncOpenAI, lines: list[Json], within_seconds: float = 60) -> Outcome:
    """Run lines to the end of their batch, with its accounts checked."""
    batch = await ended(client, await submit(client, lines), within_seconds)
    assert batch.status == "completed", batch
    return await outcome(client, batch, ids(lines))


def engine_processes(system: RunningUp, executor: str) -> list[psutil.Process]:
    """vLLM's processes below an executor."""
    return [
        process
        for process in psutil.Process(system.pids()[executor]).children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE and "VLLM::" in " ".join(process.cmdline())
    ]


async def test_a_batch_is_taken_before_any_engine_is_there(client: AsyncOpenAI) -> None:
    # `up` says that it is ready in seconds; engines need far longer, and the batch waits.
    began = time.monotonic()
    found = await run(client, [tiny("first")], START_SECONDS)
    assert found.counts == (1, 1, 0)
    assert time.monotonic() - began > 1


async def test_a_batch_of_many_kinds_of_lines(client: AsyncOpenAI) -> None:
    night = {"name": "x", "schema": {"type": "string", "enum": ["night"]}}
    as_json = {"type": "json_schema", "json_schema": night}
    lines = [
        *(tiny(f"plain-{number}", f"request {number} waits") for number in range(30)),
        tiny("two", n=2, temperature=1, seed=3),
        tiny("likely", logprobs=True, top_logprobs=3),
        tiny("json", max_tokens=30, response_format=as_json),
        tiny("bad", max_tokens=-1),
        tiny("long", "word " * 3_000),
        tiny("steered", stream=False, priority=-5, request_id="mine"),
        tiny("parts", "x")
        | {"body": tiny("", "x")["body"] | {"messages": [_parts("hello"), _parts("night")]}},
    ]
    found = await run(client, lines)
    assert found.counts == (len(lines), len(lines) - 2, 2)
    assert found.codes == {"bad": 400, "long": 400}
    bodies = {line["custom_id"]: line["response"]["body"] for line in found.output}
    assert [choice["index"] for choice in bodies["two"]["choices"]] == [0, 1]
    assert len(bodies["likely"]["choices"][0]["logprobs"]["content"]) > 0
    assert json.loads(bodies["json"]["choices"][0]["message"]["content"]) == "night"
    assert {body["model"] for body in bodies.values()} == {TINY}
    assert {body["object"] for body in bodies.values()} == {"chat.completion"}


def _parts(text: str) -> Json:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


async def test_a_line_that_could_kill_the_engine_does_not_by_default(client: AsyncOpenAI) -> None:
    found = await run(client, lines_with_a_killer(), START_SECONDS)
    assert found.counts == (LINES, LINES, 0)


async def test_greedy_answers_are_the_same_each_time(client: AsyncOpenAI) -> None:
    for text in ("the lazy dog", "a batch of requests"):
        line = tiny("one", text, ignore_eos=True, logprobs=True)
        [first, second] = [_tokens(await run(client, [line])) for _ in range(2)]
        assert len(first) == 16
        assert first == second


def _tokens(found: Outcome) -> list[tuple[str, float]]:
    """What one line alone in the engine was answered, token for token."""
    [line] = found.output
    content = line["response"]["body"]["choices"][0]["logprobs"]["content"]
    return [(token["token"], token["logprob"]) for token in content]


async def test_the_small_model_knows_a_fact(client: AsyncOpenAI) -> None:
    asked = {
        "paris": "What is the capital of France? Answer in one sentence.",
        "water": "What is the chemical formula of water? Answer in one sentence.",
    }
    lines = [
        chat(custom_id, text, SMALL, max_tokens=40, temperature=0)
        for custom_id, text in asked.items()
    ]
    answers = (await run(client, lines, START_SECONDS)).answers()
    assert "Paris" in answers["paris"]
    assert "H2O" in answers["water"].replace("\u2082", "2")


async def test_a_cancel_stops_the_engine(system: RunningUp, client: AsyncOpenAI) -> None:
    lines = [tiny(f"r{each}", max_tokens=1_900, ignore_eos=True) for each in range(6 * SEATS)]
    watch = Watch(client, await submit(client, lines))
    await watch.until_status("in_progress")
    processes = engine_processes(system, "executor-0")
    used = _cpu_seconds(processes)
    # At work, and far from the end.
    await eventually(lambda: _cpu_seconds(processes) > used + 0.5)
    assert (await client.batches.cancel(watch.batch.id)).status == "cancelling"
    seen = [(time.monotonic(), _cpu_seconds(processes))]

    def idle() -> bool:
        now, used = time.monotonic(), _cpu_seconds(processes)
        seen.append((now, used))
        earlier = [each for each in seen if each[0] <= now - IDLE_SECONDS]
        return bool(earlier) and used - earlier[-1][1] <= 0.02

    await eventually(idle, every_seconds=0.02)
    # What it worked on is the measure: a busy machine makes a second longer, not more of it.
    assert seen[-1][1] - seen[0][1] < SECONDS_TO_STOP
    batch = await watch.end()
    assert batch.status == "cancelled"
    found = await outcome(client, batch, ids(lines))
    # Nothing that was cut short passes for an answer.
    for line in found.output:
        assert line["response"]["body"]["usage"]["completion_tokens"] == 1_900
    assert set(found.codes.values()) == {"batch_cancelled"}


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def test_a_killed_engine_costs_no_line(system: RunningUp, client: AsyncOpenAI) -> None:
    lines = [tiny(f"r{each}", f"{each}", max_tokens=300, ignore_eos=True) for each in range(64)]
    executor = system.pids()["executor-0"]
    watch = Watch(client, await submit(client, lines))
    await watch.half_way()
    [core] = [
        process
        for process in engine_processes(system, "executor-0")
        if "EngineCore" in " ".join(process.cmdline())
    ]
    core.kill()
    batch = await watch.end(START_SECONDS)
    found = await outcome(client, batch, ids(lines))
    assert found.counts == (64, 64, 0)
    for line in found.output:
        assert line["response"]["body"]["usage"]["completion_tokens"] == 300
    # The engine was started anew, by the executor that it belongs to.
    assert system.pids()["executor-0"] == executor
    assert core.pid not in {process.pid for process in engine_processes(system, "executor-0")}
