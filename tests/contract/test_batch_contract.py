"""The contract of batches, held to with the official client over a whole running system.

The faults that take seconds (time-outs, dead engines, windows that end) are all begun by the
first test that asks for one of them, and pass at the same time.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI
from openai.types import Batch
from openai.types.chat import ChatCompletion

from tests.contract.conftest import NOBODY
from tests.kit.batches import (
    COMPLETIONS,
    EMBEDDINGS,
    ENDED,
    Json,
    Outcome,
    Watch,
    answer_to,
    chat,
    chats,
    check_answers,
    create,
    ended,
    ids,
    jsonl,
    outcome,
    request,
    run,
    submit,
    upload,
)
from tests.kit.up import RunningUp

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

BATCH_KEYS = {
    *("id", "object", "endpoint", "model", "errors", "input_file_id", "completion_window"),
    *("status", "output_file_id", "error_file_id", "created_at", "in_progress_at"),
    *("expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at", "request_counts", "usage", "metadata"),
    # The one key that is ours.
    "nightshift",
}
SEATS = 64
FOREVER = {"delay_ms": 600_000}


async def raw_batch(client: AsyncOpenAI, batch_id: str) -> Json:
    """The batch as it is on the wire."""
    answer = await client.batches.with_raw_response.retrieve(batch_id)
    found: Json = json.loads(answer.http_response.content)
    return found


# --- the life of a batch ---------------------------------------------------------------------


# contract: 24, 25, 55, 56, 57, 58, 59, 62, 64, 66, 67, 68, 69, 71
async def test_the_life_of_a_batch(openai_client: AsyncOpenAI) -> None:
    client = openai_client
    lines = [
        chat(f"r{number}", f"text {number}", x_simulate={"delay_ms": 50 + number % 5 * 150})
        for number in range(150)
    ]
    batch = await submit(client, lines)
    assert (batch.object, batch.status) == ("batch", "validating")
    assert batch.expires_at == batch.created_at + 86_400
    at_once = await raw_batch(client, batch.id)
    assert at_once.keys() == BATCH_KEYS
    assert at_once["object"] == "batch"
    assert at_once["errors"] is None
    assert at_once["metadata"] is None
    assert at_once["output_file_id"] is at_once["error_file_id"] is None

    seen = []
    watch = Watch(client, batch)
    while not watch.ended:
        await watch.poll()
        assert watch.batch.output_file_id is None or watch.ended
        seen.append((watch.batch.status, watch.total, watch.done))
    assert {total for status, total, _ in seen if status != "validating"} == {150}
    # `Watch` has seen to it that none of them went back.
    assert len({done for status, _, done in seen if status == "in_progress"}) > 1
    done = watch.batch
    assert done.status == "completed"
    assert done.created_at <= (done.in_progress_at or 0) <= (done.finalizing_at or 0)
    assert (done.finalizing_at or 0) <= (done.completed_at or 0)
    assert done.failed_at is done.expired_at is done.cancelling_at is done.cancelled_at is None
    assert done.model == "simulated"
    assert done.errors is None
    assert (await raw_batch(client, batch.id)).keys() == BATCH_KEYS

    found = await outcome(client, done, ids(lines))
    assert found.counts == (150, 150, 0)
    assert done.error_file_id is None
    check_answers(found, lines)
    body = found.output[0]["response"]["body"]
    assert body["object"] == "chat.completion"
    answer = ChatCompletion.model_validate(body)
    assert answer.usage is not None
    assert answer.usage.total_tokens > 0
    assert answer.choices[0].finish_reason == "stop"
    assert body["system_fingerprint"] == "simulated"
    assert done.output_file_id is not None
    file = await client.files.retrieve(done.output_file_id)
    content = (await client.files.content(file.id)).content
    assert (file.purpose, file.bytes) == ("batch_output", len(content))
    assert file.filename == f"{batch.id}_output.jsonl"


async def test_the_same_with_the_synchronous_client(system: RunningUp) -> None:
    await asyncio.to_thread(_life_in_a_thread, system.base_url)


def _life_in_a_thread(base_url: str) -> None:
    lines = [*chats(5), chat("bad", temperature=9)]
    with OpenAI(base_url=base_url, api_key="anything") as client:
        file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        deadline = time.monotonic() + 20
        while batch.status not in ENDED:
            assert time.monotonic() < deadline, batch
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        output = client.files.content(batch.output_file_id).text
        errors = client.files.content(batch.error_file_id).text
        listed = [each.id for each in client.batches.list(limit=100)]
    assert [json.loads(line)["custom_id"] for line in output.splitlines()] == [
        f"r{number}" for number in range(5)
    ]
    assert [json.loads(line)["custom_id"] for line in errors.splitlines()] == ["bad"]
    assert batch.id in listed


async def test_three_thousand_lines(openai_client: AsyncOpenAI) -> None:
    lines = chats(3_000)
    random.Random(3).shuffle(lines)
    found = await run(openai_client, lines)
    assert found.counts == (3_000, 3_000, 0)
    check_answers(found, lines)


# contract: 27
async def test_metadata_comes_back(openai_client: AsyncOpenAI) -> None:
    metadata = {"who": "me", "k" * 64: "v" * 512, "emoji": "\N{CRESCENT MOON}", "empty": ""}
    batch = await submit(openai_client, chats(1), metadata=metadata)
    assert batch.metadata == metadata
    assert (await ended(openai_client, batch)).metadata == metadata


# contract: 38
async def test_two_batches_of_one_file(openai_client: AsyncOpenAI) -> None:
    lines = chats(3)
    file_id = await upload(openai_client, lines)
    both = [await create(openai_client, file_id) for _ in range(2)]
    assert both[0].id != both[1].id
    for batch in both:
        done = await ended(openai_client, batch)
        assert (await outcome(openai_client, done, ids(lines))).counts == (3, 3, 0)


# contract: 72
async def test_the_input_may_be_deleted_while_it_runs(openai_client: AsyncOpenAI) -> None:
    lines = chats(200, x_simulate={"delay_ms": 40})
    file_id = await upload(openai_client, lines)
    watch = Watch(openai_client, await create(openai_client, file_id))
    await watch.until_status("in_progress")
    await openai_client.files.delete(file_id)
    found = await outcome(openai_client, await watch.end(), ids(lines))
    assert found.counts == (200, 200, 0)
    check_answers(found, lines)


# contract: 65
async def test_custom_ids_come_back_as_they_were(openai_client: AsyncOpenAI) -> None:
    names = [
        'a "quoted" \\ id',
        "\N{CRESCENT MOON}\N{FAMILY}\u200d",
        "x" * 512,
        "\N{CRESCENT MOON}" * 512,
        "line\u2028and\u2029paragraph\u0085end",
        "tab\tnew\nline\r\x00\x1f\x7f",
        "e\u0301",
        "\u00e9",
        " ",
        "null",
        "1",
        "{}",
        "</script>",
    ]
    lines = [chat(each, f"text of {number}") for number, each in enumerate(names)]
    found = await run(openai_client, lines)
    assert found.counts == (len(names), len(names), 0)
    check_answers(found, lines)


# contract: 60, 63
async def test_a_batch_whose_every_line_fails_is_completed(openai_client: AsyncOpenAI) -> None:
    lines = [
        chat("a", max_tokens=-1),
        chat("b", temperature="hot"),
        chat("c", n=0),
        chat("d", x_simulate={"status": 404}),
    ]
    found = await run(openai_client, lines)
    assert found.batch.status == "completed"
    assert found.batch.output_file_id is None
    assert found.counts == (4, 0, 4)
    assert found.codes == {"a": 400, "b": 400, "c": 400, "d": 404}
    usage = found.batch.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (0, 0, 0)


# contract: 61, 63, 71
async def test_failures_and_successes_are_told_apart(openai_client: AsyncOpenAI) -> None:
    lines = [
        chat(f"r{number}", f"text {number}", **({"n": 0} if number % 3 == 1 else {}))
        for number in range(300)
    ]
    found = await run(openai_client, lines)
    assert found.counts == (300, 200, 100)
    check_answers(found, lines)
    file = await openai_client.files.retrieve(found.batch.error_file_id or "")
    assert file.filename == f"{found.batch.id}_error.jsonl"


async def test_completions_and_embeddings(openai_client: AsyncOpenAI) -> None:
    def line(custom_id: str, url: str, **body: Any) -> Json:
        return request(custom_id, {"model": "simulated", **body}, url)

    prompts = [
        line("a", COMPLETIONS, prompt="one two"),
        line("b", COMPLETIONS, prompt=["one", "two"], n=2),
        line("bad", COMPLETIONS, prompt="one", n=0),
        line("empty", COMPLETIONS, prompt=""),
    ]
    found = await run(openai_client, prompts, endpoint=COMPLETIONS)
    texts = [
        [choice["text"] for choice in each["response"]["body"]["choices"]] for each in found.output
    ]
    one, two = answer_to("one"), answer_to("two")
    assert texts == [[answer_to("one two")], [one, one, two, two], [answer_to("")]]
    assert found.codes == {"bad": 400}

    inputs = [
        line("a", EMBEDDINGS, input="night"),
        line("b", EMBEDDINGS, input=["night", "shift"]),
        line("c", EMBEDDINGS, input="night", encoding_format="base64"),
    ]
    found = await run(openai_client, inputs, endpoint=EMBEDDINGS)
    assert found.counts == (3, 3, 0)
    vectors = [
        [item["embedding"] for item in each["response"]["body"]["data"]] for each in found.output
    ]
    assert vectors[0][0] == vectors[1][0] != vectors[1][1]
    assert isinstance(vectors[2][0], str)
    assert found.batch.usage is not None
    assert found.batch.usage.output_tokens == 0


async def test_results_and_lines_larger_than_a_frame(openai_client: AsyncOpenAI) -> None:
    long = "w" * (2 << 20)
    huge = {"output_bytes": 3 << 20}
    lines = [
        chat("small"),
        *(chat(f"large{each}", x_simulate=huge) for each in range(2)),
        chat("long", long),
        chat("both", long, x_simulate=huge),
        chat("after"),
    ]
    found = await run(openai_client, lines)
    assert found.counts == (6, 6, 0)
    answers = found.answers()
    assert answers["small"] == answers["after"] == answer_to("hello")
    assert answers["long"] == answer_to(long)
    for name, asked in (("large0", "hello"), ("large1", "hello"), ("both", long)):
        assert answers[name] == answer_to(asked).ljust(3 << 20, "x")


# --- faults, all at once ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A batch whose lines meet a fault, or its window's end."""

    lines: list[Json]
    window: str = "24h"


def _cases() -> dict[str, Case]:
    neighbours = chats(12, model="poison", x_simulate={"delay_ms": 150})
    return {
        "hang": Case([*chats(5), chat("hangs", x_simulate={"hang": True})]),
        "500 twice": Case([*chats(3), chat("ill", x_simulate={"status": 500, "times": 2})]),
        "500 for ever": Case([*chats(3), chat("ill", x_simulate={"status": 500})]),
        "429": Case([*chats(3), chat("busy", x_simulate={"status": 429, "times": 2})]),
        "503": Case([*chats(3), chat("busy", x_simulate={"status": 503, "times": 2})]),
        "418": Case([*chats(3), chat("ill", x_simulate={"status": 418, "times": 1})]),
        "poison": Case(
            [
                *neighbours[:7],
                chat("kills", "poison", "poison", x_simulate={"crash": True}),
                *neighbours[7:],
            ]
        ),
        "beside the poison": Case(chats(80, model="poison", x_simulate={"delay_ms": 100})),
        "crash once": Case(
            [
                *chats(70, model="poison", x_simulate={"delay_ms": 60}),
                chat("stumbles", "once", "poison", x_simulate={"crash": 1}),
            ]
        ),
        "engine hangs": Case(
            [
                *chats(3, model="stuck", x_simulate={"delay_ms": 50}),
                chat("stops", "all", "stuck", x_simulate={"hang": "engine"}),
            ]
        ),
        "over before it begins": Case(chats(64, model=NOBODY), window="2s"),
        "over half way": Case(
            [*chats(30), *(chat(f"slow{each}", x_simulate=FOREVER) for each in range(SEATS + 40))],
            window="2s",
        ),
    }


@dataclass(frozen=True)
class Faults:
    """The batches of all cases, under way."""

    client: AsyncOpenAI
    cases: dict[str, Case]
    batches: dict[str, Batch]

    async def outcome(self, name: str, within_seconds: float = 30) -> Outcome:
        """Wait for a case's end and read its files."""
        batch = await ended(self.client, self.batches[name], within_seconds)
        return await outcome(self.client, batch, ids(self.cases[name].lines))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def faults(openai_client: AsyncOpenAI) -> AsyncIterator[Faults]:
    """Begin the batches of all cases."""
    cases = _cases()
    made = await asyncio.gather(
        *(submit(openai_client, case.lines, window=case.window) for case in cases.values())
    )
    yield Faults(openai_client, cases, dict(zip(cases, made, strict=True)))


# contract: 84
async def test_a_window_that_ends_before_anything_ran(faults: Faults) -> None:
    found = await faults.outcome("over before it begins")
    batch = found.batch
    assert batch.status == "expired"
    assert batch.completion_window == "2s"
    assert batch.expires_at == batch.created_at + 2
    assert (batch.expired_at or 0) >= batch.expires_at
    assert batch.completed_at is None
    assert found.counts == (64, 0, 0)
    assert set(found.codes.values()) == {"batch_expired"}
    assert found.errors[0]["error"]["message"] == (
        "This request could not be executed before the completion window expired."
    )
    with pytest.raises(openai.ConflictError):
        await faults.client.batches.cancel(batch.id)


# contract: 84, 85
async def test_a_window_that_ends_half_way(faults: Faults) -> None:
    found = await faults.outcome("over half way")
    assert found.batch.status == "expired"
    assert found.counts == (30 + SEATS + 40, 30, 0)
    assert set(found.answers()) == {f"r{number}" for number in range(30)}
    check_answers(found, faults.cases["over half way"].lines)
    assert await faults.client.batches.retrieve(found.batch.id) == found.batch
    assert set(found.codes.values()) == {"batch_expired"}


async def test_a_passing_fault_is_tried_again(faults: Faults) -> None:
    for name in ("500 twice", "429", "503"):
        found = await faults.outcome(name)
        assert found.counts == (4, 4, 0), name
        check_answers(found, faults.cases[name].lines)


async def test_a_lasting_fault_is_the_result(faults: Faults) -> None:
    found = await faults.outcome("500 for ever")
    assert found.counts == (4, 3, 1)
    assert found.codes == {"ill": 500}
    assert found.errors[0]["response"]["body"]["error"]["type"] == "server_error"
    found = await faults.outcome("418")
    assert found.codes == {"ill": 418}


async def test_a_line_that_hangs_times_out(faults: Faults) -> None:
    found = await faults.outcome("hang")
    assert found.batch.status == "completed"
    assert found.counts == (6, 5, 1)
    assert found.codes == {"hangs": "request_timeout"}


async def test_a_line_that_kills_its_engine_takes_no_other_with_it(faults: Faults) -> None:
    found = await faults.outcome("poison")
    assert found.batch.status == "completed"
    assert found.counts == (13, 12, 1)
    assert found.codes == {"kills": "engine_failure"}
    check_answers(found, faults.cases["poison"].lines)


@pytest.mark.parametrize(("name", "count"), [("beside the poison", 80), ("crash once", 71)])
async def test_lines_beside_a_death_succeed(faults: Faults, name: str, count: int) -> None:
    found = await faults.outcome(name)
    assert found.counts == (count, count, 0)
    check_answers(found, faults.cases[name].lines)


async def test_an_engine_that_hangs_is_found(faults: Faults) -> None:
    found = await faults.outcome("engine hangs", within_seconds=50)
    assert found.counts == (4, 3, 1)
    assert found.codes == {"stops": "engine_failure"}
    check_answers(found, faults.cases["engine hangs"].lines)


# --- cancel ----------------------------------------------------------------------------------


# contract: 74, 75, 76, 77, 78
async def test_cancel_while_it_runs(openai_client: AsyncOpenAI) -> None:
    client = openai_client
    lines = [*chats(20), *(chat(f"slow{each}", x_simulate=FOREVER) for each in range(100))]
    watch = Watch(client, await submit(client, lines))
    await watch.until(lambda: watch.done == 20, 20)
    cancelling = await client.batches.cancel(watch.batch.id)
    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at is not None
    assert cancelling.output_file_id is cancelling.error_file_id is None
    again = await client.batches.cancel(watch.batch.id)
    assert again.status in ("cancelling", "cancelled")
    assert again.cancelling_at == cancelling.cancelling_at
    began = time.monotonic()
    done = await watch.end()
    assert time.monotonic() - began < 5
    assert done.status == "cancelled"
    assert (done.cancelled_at or 0) >= cancelling.cancelling_at
    found = await outcome(client, done, ids(lines))
    assert found.counts == (120, 20, 0)
    check_answers(found, lines)
    assert set(found.codes.values()) == {"batch_cancelled"}
    assert await client.batches.cancel(done.id) == done
    # The seats are free again.
    assert (await run(client, chats(2 * SEATS), 10)).counts == (128, 128, 0)


async def test_cancel_of_what_nobody_runs(openai_client: AsyncOpenAI) -> None:
    lines = chats(3, model=NOBODY)
    watch = Watch(openai_client, await submit(openai_client, lines))
    await watch.until_status("in_progress")
    await openai_client.batches.cancel(watch.batch.id)
    found = await outcome(openai_client, await watch.end(), ids(lines))
    assert found.batch.status == "cancelled"
    assert found.counts == (3, 0, 0)


async def test_cancel_race(openai_client: AsyncOpenAI) -> None:
    """Cancels at any moment: before validation, before dispatch, while it runs, after the end."""
    client = openai_client
    chance = random.Random(20)

    async def race(wait: float, lines: list[Json]) -> str:
        watch = Watch(client, await submit(client, lines))
        await asyncio.sleep(wait)
        try:
            answer = await client.batches.cancel(watch.batch.id)
        except openai.ConflictError:
            assert (await client.batches.retrieve(watch.batch.id)).status == "completed"
        else:
            assert answer.status in ("cancelling", "cancelled")
            assert (await client.batches.cancel(watch.batch.id)).status in (
                "cancelling",
                "cancelled",
            )
        began = time.monotonic()
        done = await watch.end()
        assert time.monotonic() - began < 8
        if done.request_counts is not None and done.request_counts.total == 0:
            # Cancelled before it was validated: its lines were never counted.
            assert done.status == "cancelled"
            assert done.output_file_id is done.error_file_id is None
            return "unvalidated"
        found = await outcome(client, done, ids(lines))
        check_answers(found, lines)
        assert set(found.codes.values()) <= {"batch_cancelled"}
        # One cancelled after its last line has all of them, too.
        assert done.status == "cancelled" or found.counts == (25, 25, 0)
        return done.status

    def lines() -> list[Json]:
        return [
            chat(f"r{each}", f"text {each}", x_simulate={"delay_ms": chance.randrange(300)})
            for each in range(25)
        ]

    races = [race(chance.uniform(0, 0.5), lines()) for _ in range(24)]
    races += [race(0.0, lines()) for _ in range(4)]
    ends = await asyncio.gather(*races)
    assert ends.count("cancelled") > 0
    # At its ease, and all over: what was left of those does not hold seats.
    assert await race(3.0, lines()) == "completed"


# contract: 79, 80
async def test_a_cancel_after_the_end_is_one_request(system: RunningUp) -> None:
    asked: list[str] = []

    async def note(request: httpx2.Request) -> None:
        asked.append(request.url.path)

    async with (
        httpx2.AsyncClient(event_hooks={"request": [note]}) as http,
        AsyncOpenAI(base_url=system.base_url, api_key="x", http_client=http) as client,
    ):
        batch = await ended(client, await submit(client, chats(1)))
        failed = await ended(client, await submit(client, [chat("a", model="unknown")]))
        assert (batch.status, failed.status) == ("completed", "failed")
        for over in (batch, failed):
            asked.clear()
            with pytest.raises(openai.ConflictError) as caught:
                await client.batches.cancel(over.id)
            assert asked == [f"/v1/batches/{over.id}/cancel"]
            assert caught.value.response.headers["x-should-retry"] == "false"
            assert f"Cannot cancel a batch with status '{over.status}'." in str(caught.value)


# --- refusals at creation --------------------------------------------------------------------


# contract: 16, 81
async def test_unknown_ids(openai_client: AsyncOpenAI) -> None:
    unknown = "batch_" + "0" * 32
    for call in (openai_client.batches.retrieve, openai_client.batches.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            await call(unknown)
        assert unknown in str(caught.value)
        assert caught.value.response.headers["x-request-id"]
    file = "file-" + "0" * 32
    for ask in (
        openai_client.files.retrieve,
        openai_client.files.delete,
        openai_client.files.content,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(file)
        assert caught.value.param == "id"


# contract: 35, 36
async def test_an_unknown_or_unfit_input_file_fails_the_batch(openai_client: AsyncOpenAI) -> None:
    client = openai_client
    other = await client.files.create(file=("x.jsonl", jsonl(chats(1))), purpose="user_data")
    deleted = await upload(client, chats(1))
    await client.files.delete(deleted)
    for file_id in ("file-" + "0" * 32, other.id, deleted):
        batch = await create(client, file_id)
        assert batch.input_file_id == file_id
        done = await ended(client, batch, 5)
        assert done.status == "failed"
        assert done.errors is not None
        [error] = done.errors.data or []
        assert (error.code, error.line, error.param) == ("invalid_request", None, "file_id")
        assert done.request_counts is not None
        assert done.request_counts.total == 0


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"endpoint": "/v1/bogus"}, "invalid_value", "endpoint"),
        ({"completion_window": "48h"}, "invalid_value", "completion_window"),
        ({"metadata": {"a": ["b"]}}, "invalid_type", "metadata.a"),
        ({"input_file_id": openai.omit}, "missing_required_parameter", "input_file_id"),
    ],
)
async def test_bad_parameters_make_no_batch(
    openai_client: AsyncOpenAI, fields: dict[str, Any], code: str, param: str
) -> None:
    before = (await openai_client.batches.list(limit=1)).data
    good = {
        "input_file_id": await upload(openai_client, chats(1)),
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    with pytest.raises(openai.BadRequestError) as caught:
        await openai_client.batches.create(**{**good, **fields})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert (await openai_client.batches.list(limit=1)).data == before
