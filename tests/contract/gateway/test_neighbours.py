"""What one project or address holds of a gateway keeps no other out."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx2
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.gateway.main import Listening, running
from services.gateway.settings import GatewaySettings
from services.kit.calls import rpc
from services.kit.wire.api_keys import new_key
from tests.kit.eventually import eventually
from tests.kit.public_store import SECRET, ScriptedStore

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="session")]

CONTENT = b"x" * 100
KEYS = {"a": new_key(b"a" * 32), "b": new_key(b"b" * 32)}
BOUNDARY = b"--b\r\n"
FORM = (
    BOUNDARY + b'content-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' + BOUNDARY
) + b'content-disposition: form-data; name="file"; filename="f"\r\n\r\n{'


@pytest_asyncio.fixture(loop_scope="session")
async def small(
    one_store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Listening]:
    """A gateway with few places of each kind, and two projects."""
    for name, most in (
        ("store.MAX_UPLOADS", 4),
        ("store.MAX_DOWNLOADS", 4),
        ("rest.protocol.MAX_CONNECTIONS", 16),
        ("grpc.call.MAX_CALLS", 4),
    ):
        monkeypatch.setattr(f"services.gateway.{name}", most)
    one_store.forget()
    for project, key in KEYS.items():
        one_store.add_key(key, project_id=project)
    settings = GatewaySettings(
        listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", store=f"127.0.0.1:{one_store.port}"
    )
    async with running(settings, SECRET) as listening:
        yield listening
    one_store.forget()


async def idle_upload(
    at: Listening, project: str, more: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Begin an upload that does not go on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", at.http_port)
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: localhost\r\n"
        f"authorization: Bearer {KEYS[project]}\r\ncontent-length: 9000000\r\n"
        f"content-type: multipart/form-data; boundary=b\r\n{more}\r\n"
    )
    writer.write(head.encode() + FORM)
    return reader, writer


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, str, dict[str, str]]:
    """Return status, head and error of an answer."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).decode()
    length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
    error = json.loads(await reader.readexactly(length))["error"]
    return int(head.split()[1]), head.lower(), error


async def test_idle_uploads_of_one_project_leave_room_for_others(
    small: Listening, one_store: ScriptedStore
) -> None:
    held = [await idle_upload(small, "a") for _ in range(2)]
    await eventually(lambda: len(one_store.uploads) == 2)
    reader, writer = await idle_upload(small, "a")
    status, head, error = await answer_of(reader)
    assert status == 429
    assert "retry-after: 1\r\n" in head
    assert "your share" in error["message"]
    base = f"http://127.0.0.1:{small.http_port}/v1"
    async with httpx2.AsyncClient(
        base_url=base, headers={"authorization": f"Bearer {KEYS['b']}"}, timeout=20
    ) as bob:
        sent = {"file": ("f.jsonl", CONTENT)}
        assert (await bob.post("/files", data={"purpose": "batch"}, files=sent)).status_code == 200
        file = one_store.add_file(CONTENT)
        assert (await bob.get(f"/files/{file.id}/content")).content == CONTENT
    # Downloads are counted apart.
    async with httpx2.AsyncClient(
        base_url=base, headers={"authorization": f"Bearer {KEYS['a']}"}, timeout=20
    ) as alice:
        assert (await alice.get(f"/files/{file.id}/content")).content == CONTENT
    for _, each in (*held, (reader, writer)):
        each.transport.abort()


async def test_an_upload_that_drips_is_ended(
    small: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.rest.pace.WINDOW_SECONDS", 0.3)
    reader, writer = await idle_upload(small, "a")

    async def drip() -> None:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    try:
        status, _, error = await answer_of(reader)
    finally:
        dripping.cancel()
        writer.transport.abort()
    assert (status, error["code"]) == (400, "upload_too_slow")
    assert "at least 61440 are wanted" in error["message"]


async def test_idle_connections_of_one_address_leave_room_for_others(small: Listening) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", small.http_port) for _ in range(8)]
    try:
        reader, _ = refused = await asyncio.open_connection("127.0.0.1", small.http_port)
        opened.append(refused)
        status, head, error = await answer_of(reader)
        assert status == 503
        assert "retry-after: 1\r\n" in head
        assert "too many connections from this address" in error["message"]
        reader, writer = another = await asyncio.open_connection(
            "127.0.0.1", small.http_port, local_addr=("127.0.0.2", 0)
        )
        opened.append(another)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200 OK" in await asyncio.wait_for(reader.readline(), 30)
    finally:
        for _, writer in opened:
            writer.transport.abort()

    async def taken_again() -> bool:
        async with httpx2.AsyncClient() as client:
            url = f"http://127.0.0.1:{small.http_port}/healthz"
            return (await client.get(url)).status_code == 200

    await eventually(taken_again)


async def test_calls_whose_message_does_not_come_are_counted(small: Listening) -> None:
    async with rpc.open_channel(f"127.0.0.1:{small.grpc_port}") as channel:
        begin = channel.stream_unary("/grpc.health.v1.Health/Check")
        calls: list[Any] = [begin() for _ in range(2)]

        async def refused() -> bool:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]
                    health_pb2.HealthCheckRequest()
                )
            except grpc.aio.AioRpcError as error:
                return "too many calls from this address" in str(error.details())
            return False

        await eventually(refused, within_seconds=60)
        for call in calls:
            call.cancel()


async def test_nobody_names_the_address_that_it_is_counted_by(
    one_store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys addresses count."""
    monkeypatch.setattr("services.gateway.store.MAX_UPLOADS", 4)
    one_store.forget()
    settings = GatewaySettings(
        listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", store=f"127.0.0.1:{one_store.port}"
    )
    async with running(settings, SECRET) as open_to_all:
        made = [
            await idle_upload(open_to_all, "a", f"x-forwarded-for: 192.0.2.{n}\r\n")
            for n in range(3)
        ]
        answers = [asyncio.create_task(answer_of(reader)) for reader, _ in made]
        done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result()[0] for task in done] == [429]
        for task in answers:
            task.cancel()
        for _, each in made:
            each.transport.abort()
        await asyncio.gather(*answers, return_exceptions=True)
    one_store.forget()


async def test_watches_of_health_without_a_key_are_bounded(small: Listening) -> None:
    async with rpc.open_channel(f"127.0.0.1:{small.grpc_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        watches = [stub.Watch(request) for _ in range(2)]  # type: ignore[attr-defined]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Watch(request).read()  # type: ignore[attr-defined]
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for watch in watches:
            watch.cancel()

        async def again() -> bool:
            try:
                await stub.Check(request)  # type: ignore[attr-defined]
            except grpc.aio.AioRpcError:
                return False
            return True

        await eventually(again)
