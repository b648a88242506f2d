"""The contract of batches, held to with the official client over a whole running system."""

import asyncio
import json
import random
import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion

from tests.kit.batches import (
    COMPLETIONS,
    EMBEDDINGS,
    ENDED,
    Json,
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
