"""The official Python client beyond plain calls: raw answers, pages, waiting, threads."""

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.kit.batches import CHAT, ENDED, answer_to, chats, jsonl, upload
from tests.kit.up import RunningUp

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def client(system: RunningUp) -> Iterator[OpenAI]:
    """The synchronous client, as most users have it."""
    with OpenAI(base_url=system.base_url, api_key="anything") as official:
        yield official


def ended_batch(client: OpenAI, file_id: str) -> str:
    """Run a batch to its end; return its id."""
    batch = client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
    deadline = time.monotonic() + 20
    while batch.status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    return batch.id


# contract: 1, 14, 58
def test_the_way_of_the_guides(client: OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "batchinput.jsonl"
    path.write_bytes(jsonl(chats(5)))
    with path.open("rb") as handle:
        file = client.files.create(file=handle, purpose="batch")
    batch = client.batches.retrieve(ended_batch(client, file.id))
    assert batch.output_file_id is not None
    text = client.files.content(batch.output_file_id).text
    found = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in map(json.loads, text.splitlines())
    }
    assert found == {f"r{number}": answer_to(f"line {number}") for number in range(5)}


def test_content_in_every_way(client: OpenAI, tmp_path: Path) -> None:
    content = jsonl(chats(300))
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    files = client.files
    assert files.content(file.id).read() == content
    files.content(file.id).write_to_file(tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == content
    with files.with_streaming_response.content(file.id) as answer:
        answer.stream_to_file(tmp_path / "streamed")
    assert (tmp_path / "streamed").read_bytes() == content
    with files.with_streaming_response.content(file.id) as answer:
        assert list(answer.iter_lines()) == content.decode().splitlines()
    with pytest.warns(DeprecationWarning, match="content"):
        # It asks for application/json, and yet wants the same text.
        assert files.retrieve_content(file.id) == content.decode()


# contract: 96
def test_raw_answers(client: OpenAI) -> None:
    raw = client.files.with_raw_response.create(file=("a", b"{}\n"), purpose="batch")
    assert (raw.status_code, raw.http_response.headers["content-type"]) == (200, "application/json")
    file = raw.parse()
    assert file._request_id == raw.request_id == raw.headers["x-request-id"]
    raw_page = client.files.with_raw_response.list(limit=1)
    assert raw_page.parse().data[0].id == file.id


def test_waiting_for_a_file_does_not_wait(client: OpenAI) -> None:
    file = client.files.create(file=("a", jsonl(chats(1))), purpose="batch")
    began = time.monotonic()
    # Its patience of 5 s a look is not used.
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert time.monotonic() - began < 4


async def test_waiting_asynchronously(system: RunningUp) -> None:
    async with AsyncOpenAI(base_url=system.base_url, api_key="x") as client:
        file_id = await upload(client, chats(1))
        async with asyncio.timeout(4):
            assert (await client.files.wait_for_processing(file_id)).status == "processed"


# contract: 21, 87
def test_pages_by_hand_and_by_themselves(client: OpenAI) -> None:
    made = [client.files.create(file=(f"{n}", b"x"), purpose="evals").id for n in range(5)][::-1]
    page = client.files.list(limit=2, purpose="evals")
    pages = list(page.iter_pages())
    assert [len(each.data) for each in pages[:2]] == [2, 2]
    assert all(each.has_next_page() for each in pages[:-1])
    assert not pages[-1].has_next_page()
    by_pages = [file.id for each in pages for file in each.data]
    assert by_pages[:5] == made
    assert [file.id for file in client.files.list(limit=2, purpose="evals")] == by_pages
    assert page.get_next_page().data == pages[1].data


# contract: 91
def test_a_file_in_chunks(client: OpenAI, tmp_path: Path) -> None:
    content = jsonl(chats(30))
    path = tmp_path / "chunks.jsonl"
    path.write_bytes(content)
    for given in (
        {"file": path},
        {"file": content, "filename": "chunks.jsonl", "bytes": len(content)},
    ):
        done = client.uploads.upload_file_chunked(
            **given,  # type: ignore[call-overload]
            mime_type="application/jsonl",
            purpose="batch",
            part_size=501,
        )
        assert (done.status, done.file.bytes) == ("completed", len(content))
        assert client.files.content(done.file.id).read() == content
    assert client.batches.retrieve(ended_batch(client, done.file.id)).request_counts.total == 30  # type: ignore[union-attr]


def test_a_client_in_many_threads(client: OpenAI) -> None:
    content = jsonl(chats(50))
    file = client.files.create(file=("a", content), purpose="batch")
    wanted = hashlib.sha256(content).digest()

    def read(_: int) -> bool:
        return hashlib.sha256(client.files.content(file.id).read()).digest() == wanted

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(64)))


# contract: 80
def test_what_is_refused_for_good_costs_one_request(system: RunningUp) -> None:
    asked: list[str] = []
    with (
        httpx2.Client(event_hooks={"request": [lambda each: asked.append(each.url.path)]}) as http,
        OpenAI(base_url=system.base_url, api_key="x", http_client=http) as client,
    ):
        file = client.files.create(file=("a", jsonl(chats(1))), purpose="batch")
        batch_id = ended_batch(client, file.id)
        for error, call in (
            (openai.ConflictError, lambda: client.batches.cancel(batch_id)),
            (openai.NotFoundError, lambda: client.batches.retrieve("batch_none")),
            (openai.BadRequestError, lambda: client.files.list(limit=0)),
        ):
            asked.clear()
            with pytest.raises(error):
                call()
            assert len(asked) == 1


# contract: 82
def test_a_cancel_has_a_type_and_no_body(system: RunningUp) -> None:
    sent: list[httpx2.Request] = []
    with (
        httpx2.Client(event_hooks={"request": [sent.append]}) as http,
        OpenAI(base_url=system.base_url, api_key="x", http_client=http) as client,
    ):
        slow = jsonl(chats(2, x_simulate={"delay_ms": 600_000}))
        file = client.files.create(file=("a", slow), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert client.batches.cancel(batch.id).status == "cancelling"
        assert sent[-1].headers["content-type"] == "application/json"
        assert sent[-1].content == b""
        deleted = client.files.delete(file.id)
        assert deleted.deleted
        assert sent[-1].content == b""
