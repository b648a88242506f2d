"""Requests that end half-way, never end, or never begin: none takes what the others need."""

import asyncio
import contextlib
import gzip
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx2
import psutil
import pytest
from openai import AsyncOpenAI

from tests.contract.conftest import MAX_LINE_BYTES
from tests.contract.test_files_contract import BOUNDARY, FORM, error_of, form
from tests.kit.batches import chats, create, ended, jsonl, run, upload
from tests.kit.eventually import eventually
from tests.kit.up import RunningUp

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

MIB: Final = 1 << 20
HEAD: Final = "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {type}\r\n{length}\r\n\r\n"
MULTIPART: Final = FORM["content-type"]
DRIPPERS: Final = 60


@contextlib.asynccontextmanager
async def connected(system: RunningUp) -> AsyncIterator[asyncio.StreamWriter]:
    """Open a connection, and cut it afterwards."""
    _, writer = await asyncio.open_connection("127.0.0.1", int(system.url.rsplit(":", 1)[1]))
    try:
        yield writer
    finally:
        writer.transport.abort()


def uploaded(system: RunningUp) -> set[Path]:
    """Find the content of files that the store keeps or is writing; not that of results."""
    root = system.data / "blobs"
    return {*root.glob("*/file/*"), *root.glob("tmp/*")}


def memory(system: RunningUp, *names: str) -> int:
    """Return what services hold in memory, in bytes."""
    pids = system.pids()
    return sum(psutil.Process(pids[name]).memory_info().rss for name in names)


async def files(client: AsyncOpenAI) -> list[str]:
    """List all inputs: of files, batches of earlier tests may make some more."""
    listed = await client.files.list(purpose="batch", limit=10_000)
    return [file.id for file in listed.data]


@pytest.mark.parametrize("length", ["content-length: 9000000", "transfer-encoding: chunked"])
async def test_an_upload_that_breaks_off_leaves_nothing(
    system: RunningUp, openai_client: AsyncOpenAI, length: str
) -> None:
    before, kept = await files(openai_client), uploaded(system)
    body = form(("file", jsonl(chats(20_000))), ("purpose", b"batch"))[:2_000_000]
    for cut in (len(HEAD), 150, 1_000, 2_000_000):
        async with connected(system) as writer:
            head = HEAD.format(path="/v1/files", type=MULTIPART, length=length).encode()
            piece = body[:cut]
            if "chunked" in length:
                piece = b"%x\r\n" % len(piece) + piece
            writer.write(head + piece)
            await writer.drain()
            if cut == 2_000_000:
                await eventually(lambda: uploaded(system) - kept)
    assert await files(openai_client) == before
    await eventually(lambda: uploaded(system) <= kept)


async def test_a_creation_that_breaks_off_makes_no_batch(
    system: RunningUp, openai_client: AsyncOpenAI
) -> None:
    before = (await openai_client.batches.list(limit=1)).data
    file_id = await upload(openai_client, chats(1))
    body = (
        b'{"input_file_id":"%s","endpoint":"/v1/chat/completions","completion_window":"24h"}'
        % file_id.encode()
    )
    for cut in (0, 1, len(body) - 1, len(body)):
        async with connected(system) as writer:
            length = f"content-length: {len(body) + 1}"
            head = HEAD.format(path="/v1/batches", type="application/json", length=length)
            writer.write(head.encode() + body[:cut])
            await writer.drain()
    async with connected(system) as writer:
        writer.write(b"POST /v1/batches HTTP/1.1\r\nhost: localhost\r\nconte")
        await writer.drain()
    assert (await run(openai_client, chats(1))).counts == (1, 1, 0)
    after = (await openai_client.batches.list(limit=2)).data
    assert after[1:] == before


async def drip(system: RunningUp, start: bytes, stop: asyncio.Event) -> None:
    """Send one byte every now and then, for as long as it is borne."""
    async with connected(system) as writer:
        writer.write(start)
        while not stop.is_set():
            writer.write(b"x")
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.1)


async def test_slow_requests_hold_up_nobody(system: RunningUp, openai_client: AsyncOpenAI) -> None:
    before = memory(system, "gateway", "store")
    part = b'--%s\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    chunked = "transfer-encoding: chunked"
    starts = [
        b"GET /v1/ba",
        b"GET /v1/batches HTTP/1.1\r\nx: ",
        HEAD.format(path="/v1/batches", type="x", length="content-length: 1000000").encode(),
        HEAD.format(path="/v1/files", type=MULTIPART, length="content-length: 9000000").encode()
        + part % BOUNDARY.encode(),
        HEAD.format(path="/v1/files", type=MULTIPART, length=chunked).encode() + b"f00000\r\n",
    ]
    stop = asyncio.Event()
    drippers = [
        asyncio.create_task(drip(system, starts[number % len(starts)], stop))
        for number in range(DRIPPERS)
    ]
    gateway = psutil.Process(system.pids()["gateway"])
    try:
        await eventually(lambda: len(gateway.net_connections("tcp")) > DRIPPERS)
        for _ in range(3):
            began = time.monotonic()
            assert (await run(openai_client, chats(20))).counts == (20, 20, 0)
            assert time.monotonic() - began < 10
        assert memory(system, "gateway", "store") - before < 60 * MIB
    finally:
        stop.set()
        await asyncio.gather(*drippers)


async def test_a_body_without_end_costs_no_memory(
    system: RunningUp, http: httpx2.AsyncClient
) -> None:
    before = memory(system, "gateway", "store")

    async def endless(start: bytes, count: int) -> AsyncIterator[bytes]:
        yield start
        for _ in range(count):
            yield b" " * 65_536

    answer = await http.post("/v1/batches", content=endless(b"{", 800))
    assert "1048576" in error_of(answer, 413)["message"]
    # No line end, and never a field's end.
    long_field = b'--%s\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'
    answer = await http.post(
        "/v1/files", content=endless(long_field % BOUNDARY.encode(), 800), headers=FORM
    )
    assert "longer than 4096" in error_of(answer)["message"]
    assert memory(system, "gateway", "store") - before < 40 * MIB


async def test_one_endless_line_costs_its_limit_at_most(
    system: RunningUp, openai_client: AsyncOpenAI
) -> None:
    client = openai_client
    content = jsonl(chats(1)) + b"x" * (20 * MIB)
    # Once, so that what any upload takes is not counted.
    await upload(client, content)
    before = memory(system, "gateway", "store")
    ids = [await upload(client, content) for _ in range(3)]
    assert memory(system, "gateway", "store") - before < 8 * MAX_LINE_BYTES
    done = await ended(client, await create(client, ids[0]))
    assert done.errors is not None
    assert [(e.line, e.code) for e in done.errors.data or []] == [(2, "line_too_long")]


async def test_a_compressed_body_is_refused(http: httpx2.AsyncClient) -> None:
    body = gzip.compress(form(("file", jsonl(chats(1))), ("purpose", b"batch")))
    headers = {**FORM, "content-encoding": "gzip"}
    assert (
        "gzip"
        in error_of(await http.post("/v1/files", content=body, headers=headers), 415)["message"]
    )
    headers = {"content-encoding": "br"}
    assert error_of(await http.post("/v1/batches", content=b"{}", headers=headers), 415)


async def test_a_malformed_form(http: httpx2.AsyncClient) -> None:
    good = form(("file", jsonl(chats(1))), ("purpose", b"batch"))
    for content, headers in (
        (b"", FORM),
        (b"{}", FORM),
        (good[:-4], FORM),
        (good.replace(b"form-data", b"attachment"), FORM),
        (good.replace(b'name="file"', b"name"), FORM),
        (good.replace(b"Content-Disposition", b"Content-\0Disposition"), FORM),
        (good, {"content-type": "multipart/form-data"}),
        (good, {"content-type": "multipart/form-data; boundary=another"}),
        (good, {"content-type": "application/json"}),
        (good, {"content-type": "multipart/form-data; boundary=" + "b" * 71}),
        (good, {}),
    ):
        answer = await http.post("/v1/files", content=content, headers=headers)
        assert error_of(answer)["message"]


async def test_all_is_well_afterwards(system: RunningUp, openai_client: AsyncOpenAI) -> None:
    assert "executor" in " ".join(system.pids())
    assert (await run(openai_client, chats(100))).counts == (100, 100, 0)
