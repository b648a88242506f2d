"""What lies at the edges: the largest inputs, the earliest cancel, what must reach no model."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import nats
import openai
import pytest
import pytest_asyncio
from nats.aio.msg import Msg
from openai import AsyncOpenAI
from openai.types import Batch, Completion, CreateEmbeddingResponse
from openai.types.responses import Response
from pydantic import BaseModel

from tests.contract.conftest import MAX_LINE_BYTES, MAX_RESULT_BYTES, NOBODY
from tests.kit.batches import (
    COMPLETIONS,
    EMBEDDINGS,
    RERANK,
    RESPONSES,
    SCORE,
    Json,
    Watch,
    answer_to,
    chat,
    chats,
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
from tests.kit.eventually import eventually
from tests.kit.up import RunningUp

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

MOST_LINES: Final = 50_000


def many(count: int, model: str) -> bytes:
    """Return the file of many small lines."""
    return b"".join(
        b'{"custom_id":"%d","method":"POST","url":"/v1/chat/completions",'
        b'"body":{"model":"%s","messages":[{}]}}\n' % (number, model.encode())
        for number in range(count)
    )


@pytest.mark.slow
async def test_texts_to_embed_are_not_counted(openai_client: AsyncOpenAI) -> None:
    """Over the lines of a batch; one line takes as many as OpenAI's."""
    body = {"model": "simulated", "input": ["x"] * 2_048, "dimensions": 1}
    count = MOST_LINES // len(body["input"]) + 1
    lines = [request(str(number), body, EMBEDDINGS) for number in range(count)]
    found = await run(openai_client, lines, endpoint=EMBEDDINGS)
    assert found.counts == (count, count, 0)
    for line in found.output:
        assert len(line["response"]["body"]["data"]) == len(body["input"])


# contract: 52
async def test_the_most_lines_and_one_more(openai_client: AsyncOpenAI) -> None:
    client = openai_client
    most = await submit(client, many(MOST_LINES, NOBODY))
    watch = Watch(client, most)
    await watch.until_status("in_progress", within_seconds=20)
    assert watch.total == MOST_LINES
    await client.batches.cancel(most.id)
    more = await ended(client, await submit(client, many(MOST_LINES + 1, NOBODY)))
    assert more.status == "failed"
    assert more.errors is not None
    [error] = more.errors.data or []
    assert (error.line, error.code) == (None, "too_many_tasks")
    assert str(MOST_LINES) in (error.message or "")
    assert (await watch.end()).status == "cancelled"


# contract: 83
async def test_a_cancel_before_the_validation_is_done(
    system: RunningUp, openai_client: AsyncOpenAI
) -> None:
    client = openai_client
    blobs = system.data / "blobs"
    before = set(blobs.glob("*/*/*"))
    file_id = await upload(client, chats(1))
    # Validating is waiting for what its disk will not read, and is not over before the cancel.
    with unreadable(set(blobs.glob("*/*/*")) - before):
        watch = Watch(client, await create(client, file_id))
        await watch.until(lambda: "cannot be read" in (reason_of(watch.batch) or ""), 20)
        assert watch.batch.status == "validating"
        cancelling = await client.batches.cancel(watch.batch.id)
        assert cancelling.status in ("cancelling", "cancelled")
        done = await watch.end(10)
    assert done.status == "cancelled"
    assert done.cancelled_at is not None
    assert done.in_progress_at is None
    assert done.output_file_id is done.error_file_id is None


def reason_of(batch: Batch) -> str | None:
    """What a batch waits for; the client passes on a key that it does not know."""
    shown: Any = batch.to_dict()["nightshift"]
    reason: str | None = shown["reason"]
    return reason


@contextlib.contextmanager
def unreadable(files: set[Path]) -> Iterator[None]:
    """Put folders in the places of files: no disk reads them, not even for the system's owner."""
    for file in files:
        file.rename(file.with_name(f"{file.name}.aside"))
        file.mkdir()
    try:
        yield
    finally:
        for file in files:
            file.rmdir()
            file.with_name(f"{file.name}.aside").rename(file)


def line_of(size: int) -> bytes:
    """Return one sound line of exactly so many bytes, without its end."""
    empty = jsonl([chat("long", "")]).rstrip(b"\n")
    line = jsonl([chat("long", "w" * (size - len(empty)))]).rstrip(b"\n")
    assert len(line) == size
    return line


async def test_a_result_far_above_an_input_line_and_one_above_its_limit(
    openai_client: AsyncOpenAI,
) -> None:
    client = openai_client
    sizes = {"small": 10, "large": 36 << 20, "too-large": MAX_RESULT_BYTES, "last": 10}
    lines = [chat(name, x_simulate={"output_bytes": size}) for name, size in sizes.items()]
    found = await outcome(client, await ended(client, await submit(client, lines)), list(sizes))
    assert found.counts == (4, 3, 1)
    assert {name: len(text) for name, text in found.answers().items()} == {
        name: size for name, size in sizes.items() if name != "too-large"
    }
    (error,) = [line["error"] for line in found.errors]
    assert error["code"] == "result_too_large"
    assert f"at most {MAX_RESULT_BYTES} bytes" in error["message"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""], ids=["lf", "crlf", "open"])
async def test_the_longest_line_and_one_byte_more(openai_client: AsyncOpenAI, end: bytes) -> None:
    client = openai_client
    first = jsonl([chat("first")])
    longest = await submit(client, first + line_of(MAX_LINE_BYTES) + end)
    longer = await ended(client, await submit(client, first + line_of(MAX_LINE_BYTES + 1) + end))
    assert longer.status == "failed"
    assert longer.errors is not None
    [error] = longer.errors.data or []
    assert (error.line, error.code, error.param) == (2, "line_too_long", None)
    assert str(MAX_LINE_BYTES) in (error.message or "")
    found = await outcome(client, await ended(client, longest), ["first", "long"])
    # Its one word is long, not many: it runs.
    assert found.counts == (2, 2, 0)


@pytest_asyncio.fixture(loop_scope="module")
async def heard(system: RunningUp) -> AsyncIterator[list[Msg]]:
    """All that is said on the bus during a test."""
    found: list[Msg] = []

    async def hear(message: Msg) -> None:
        found.append(message)

    broker: dict[str, Any] = {**system.broker()}
    client = await nats.connect(**broker)
    await client.subscribe("nightshift.>", cb=hear)
    await client.flush()
    yield found
    await client.close()


# contract: 54
async def test_nothing_of_a_failed_batch_reaches_a_model(
    openai_client: AsyncOpenAI, system: RunningUp, heard: list[Msg]
) -> None:
    executors = {name: pid for name, pid in system.pids().items() if "executor" in name}
    kills = chat("kills", model="poison", x_simulate={"crash": True})
    failed = await submit(openai_client, jsonl([kills]) + b"{broken\n")
    sound = await submit(openai_client, chats(1, model="poison"))
    assert (await ended(openai_client, failed)).status == "failed"
    # A batch made after it has run on that very model, so that the bus has had its time.
    assert (await ended(openai_client, sound)).status == "completed"
    work = [message.data for message in heard if message.subject.startswith("nightshift.work.")]
    assert any(sound.id.removeprefix("batch_").encode() in data for data in work)
    assert not any(failed.id.removeprefix("batch_").encode() in data for data in work)
    assert {name: system.pids()[name] for name in executors} == executors


# contract: 70
async def test_the_expiry_of_output_files(openai_client: AsyncOpenAI) -> None:
    client = openai_client
    lines = [*chats(1), chat("refused", n=0)]
    for fields, seconds in (
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3_600}}, 3_600),
        ({}, 2_592_000),
    ):
        done = (await run(client, lines, **fields)).batch
        for file_id in (done.output_file_id, done.error_file_id):
            assert file_id is not None
            file = await client.files.retrieve(file_id)
            assert file.expires_at == file.created_at + seconds
            assert file.purpose == "batch_output"


# contract: 72
async def test_deleting_the_input_at_once(openai_client: AsyncOpenAI) -> None:
    client = openai_client
    lines = chats(100, x_simulate={"delay_ms": 30})
    watch = Watch(client, await submit(client, lines))
    await watch.until_status("in_progress")
    await client.files.delete(watch.batch.input_file_id)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(watch.batch.input_file_id)
    assert (await outcome(client, await watch.end(), ids(lines))).counts == (100, 100, 0)


async def test_deleting_an_output_file_leaves_its_id(openai_client: AsyncOpenAI) -> None:
    client = openai_client
    done = (await run(client, chats(1))).batch
    assert done.output_file_id is not None
    await client.files.delete(done.output_file_id)
    assert await client.batches.retrieve(done.id) == done
    with pytest.raises(openai.NotFoundError):
        await client.files.content(done.output_file_id)


class Score(BaseModel):
    """As vLLM's; no client of OpenAI's has it."""

    index: int
    object: Literal["score"]
    score: float


class Scores(BaseModel):
    """The answer of /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: Literal["simulated"]
    data: list[Score]


class Ranked(BaseModel):
    """One document, with its place in the request."""

    index: int
    document: dict[str, str]
    relevance_score: float


class Ranking(BaseModel):
    """The answer of /v1/rerank."""

    id: str
    model: Literal["simulated"]
    results: list[Ranked]


# contract: 66, 67, 73
@pytest.mark.parametrize(
    ("url", "body", "shape"),
    [
        (COMPLETIONS, {"prompt": "night"}, Completion),
        (EMBEDDINGS, {"input": "night"}, CreateEmbeddingResponse),
        (RESPONSES, {"input": "night"}, Response),
        (SCORE, {"text_1": "night", "text_2": ["day", "night"]}, Scores),
        (RERANK, {"query": "night", "documents": ["day", "night"]}, Ranking),
    ],
)
async def test_one_line_of_each_endpoint(
    openai_client: AsyncOpenAI, url: str, body: Json, shape: type[BaseModel]
) -> None:
    lines = [request("a", {"model": "simulated", **body}, url)]
    found = await run(openai_client, lines, endpoint=url)
    assert found.counts == (1, 1, 0)
    assert found.batch.endpoint == url
    answer = shape.model_validate(found.output[0]["response"]["body"])
    if isinstance(answer, Response):
        assert answer.output_text == answer_to("night")
    if isinstance(answer, Scores):
        assert [entry.index for entry in answer.data] == [0, 1]
        assert answer.data[0].score < answer.data[1].score
    if isinstance(answer, Ranking):
        assert [(result.index, result.document) for result in answer.results] == [
            (1, {"text": "night"}),
            (0, {"text": "day"}),
        ]

    # What is checked before it runs, by the same table as for chat.
    faulty = [
        request("a", {"model": "simulated"}, url),
        request("b", {"model": "simulated", **body, "stream": True}, url),
    ]
    done = await ended(openai_client, await submit(openai_client, faulty, endpoint=url))
    assert done.errors is not None
    assert [(e.line, e.code, e.param) for e in done.errors.data or []] == [
        *((1, "missing_required_parameter", f"body.{field}") for field in body),
        (2, "streaming_unsupported", "body.stream"),
    ]


async def test_awkward_ids_and_names_do_not_leak_into_paths(
    openai_client: AsyncOpenAI, system: RunningUp
) -> None:
    names = ["../../../../tmp/x", "a/b", "con\x00trol", "$(reboot)", "x" * 512, "-rf"]
    found = await run(openai_client, [chat(name) for name in names])
    assert found.counts == (len(names), len(names), 0)
    blobs = [path.name for path in system.data.rglob("*")]
    assert not any("reboot" in name or name.startswith(("x" * 50, "-rf")) for name in blobs)


async def test_a_custom_id_of_ten_thousand_characters(openai_client: AsyncOpenAI) -> None:
    lines = jsonl([*chats(1), chat("x" * 10_000)])
    done = await ended(openai_client, await submit(openai_client, lines))
    assert done.status == "failed"
    assert done.errors is not None
    [error] = done.errors.data or []
    assert (error.line, error.code, error.param) == (2, "string_above_max_length", "custom_id")
    assert len(error.message or "") < 1_000


# Last: that what came before has left everything as it was.
async def test_the_system_is_well_afterwards(openai_client: AsyncOpenAI) -> None:
    async def over() -> bool:
        page = await openai_client.batches.list(limit=100)
        return all(
            batch.status in ("completed", "failed", "expired", "cancelled") for batch in page.data
        )

    await eventually(over, within_seconds=20, every_seconds=0.1)
    assert (await run(openai_client, chats(50))).counts == (50, 50, 0)
