"""Following a batch through the gateway: server-sent events and gRPC, as the store tells them."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import grpc
import httpx2
import openai
import orjson
import pytest
from openai import AsyncOpenAI

from protos.nightshift.v1 import batches_pb2, events_pb2, events_pb2_grpc
from services.gateway import batch_watch
from services.gateway.main import running
from services.gateway.settings import GatewaySettings
from services.kit.wire.errors import NotFoundError, UnavailableError, from_rpc_error
from tests.kit.eventually import eventually
from tests.kit.public_store import SECRET, ScriptedStore, batch_id, make_batch

pytestmark = pytest.mark.asyncio(loop_scope="session")

# What gRPC tries by itself before anyone hears of it.
TRIES = 5
PATH = f"/v1/batches/{batch_id()}/events"
RUNNING = batches_pb2.BATCH_STATUS_IN_PROGRESS
COMPLETED = batches_pb2.BATCH_STATUS_COMPLETED

Page = events_pb2.ReadBatchEventsResponse
Event = events_pb2.WatchBatchResponse


def state(number: int, status: batches_pb2.BatchStatus.ValueType) -> Event:
    shown = events_pb2.BatchStateEvent(event_id=str(number), batch=make_batch(status=status))
    return Event(state=shown)


def results(lines: bytes, *ids: str) -> Event:
    return Event(results=events_pb2.ResultLinesEvent(lines=lines, event_ids=ids))


def page(*told: Event, after: str, ended: bool = False) -> Page:
    return Page(events=told, next=after, ended=ended)


END = page(state(9, COMPLETED), after="9", ended=True)


def script(store: ScriptedStore, *pages: Any) -> None:
    store.script("ReadBatchEvents", *pages)


def asked(store: ScriptedStore) -> list[str]:
    """What each page was asked after."""
    return [request.watch.after for request in store.requests("ReadBatchEvents")]


async def test_what_is_sent_byte_by_byte(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    script(
        store,
        page(results(b'{"a":1}\n{"b":2}\n', "3.1", "3.2"), state(3, RUNNING), after="3"),
        page(results(b'{"long":"'), after="4.0.9"),
        page(after="4.0.9"),
        page(results(b"x" * 20), after="4.0.29"),
        page(results(b'"}\n{"c":3}\n', "4.1", "4.2"), after="4.2"),
        page(Event(reset=events_pb2.ResetEvent(event_id="o0")), after="o0"),
        END,
    )
    answer = await http.get(PATH, params={"include": "results"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-request-id"].startswith("req_")
    opening, comment, rest = answer.content.split(b"\n", 2)
    assert opening.startswith(b":")
    assert comment == b"retry: 1000"
    blocks = rest.split(b"\n\n")
    assert blocks.pop() == b""
    assert blocks[0] == b'event: results\ndata: {"a":1}\nid: 3.1'
    assert blocks[1] == b'event: results\ndata: {"b":2}\nid: 3.2'
    assert blocks[2].startswith(b'event: state\nid: 3\ndata: {"id":"batch_')
    assert blocks[3] == b'event: results\ndata: {"long":"' + b"x" * 20 + b'"}\nid: 4.1'
    assert blocks[4] == b'event: results\ndata: {"c":3}\nid: 4.2'
    assert blocks[5].startswith(b"event: reset\nid: o0\ndata: {")
    assert blocks[6].startswith(b"event: state\nid: 9\ndata: {")
    assert len(blocks) == 7
    assert asked(store) == ["", "3", "4.0.9", "4.0.9", "4.0.29", "4.2", "o0"]
    first, *later = store.requests("ReadBatchEvents")
    assert first.watch.include_results
    assert (first.wait_ms, {request.wait_ms for request in later}) == (0, {14_000})


async def test_a_parser_that_many_use(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    script(store, page(state(2, RUNNING), after="2"), page(after="2"), END)
    async with http.stream("GET", PATH) as answer:
        seen = [event async for event in httpx2.EventSource(answer)]
    assert [(event.event, event.id) for event in seen] == [("state", "2"), ("state", "9")]
    shown: Any = seen[-1].json()
    assert (shown["object"], shown["status"]) == ("batch", "completed")
    assert not store.requests("ReadBatchEvents")[0].watch.include_results


async def test_the_official_client_reads_it(client: AsyncOpenAI, store: ScriptedStore) -> None:
    script(store, page(results(b'{"custom_id":"r0"}\n', "2.1"), after="2.1"), END)
    stream = await client.get(
        f"/batches/{batch_id()}/events",
        cast_to=object,
        options={"params": {"include": "results"}},
        stream=True,
        stream_cls=openai.AsyncStream[object],
    )
    first, last = [item async for item in stream]
    assert first == {"custom_id": "r0"}
    assert isinstance(last, dict)
    assert last["status"] == "completed"


@pytest.mark.parametrize(
    ("query", "header", "after"),
    [({}, None, ""), ({"after": "3.1"}, None, "3.1"), ({"after": "3"}, "7.2", "7.2")],
)
async def test_where_it_goes_on(
    http: httpx2.AsyncClient,
    store: ScriptedStore,
    query: dict[str, str],
    header: str | None,
    after: str,
) -> None:
    script(store, END)
    headers = {} if header is None else {"Last-Event-ID": header}
    await http.get(PATH, params=query, headers=headers)
    assert asked(store) == [after]


async def test_what_is_refused(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    answer = await http.get(PATH, params={"include": "everything"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "include"
    answer = await http.get("/v1/batches/no.id/events")
    assert answer.status_code == 404
    script(store, NotFoundError("No batch found with id 'x'."))
    answer = await http.get(PATH)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "No batch found with id 'x'."
    script(store, *[UnavailableError("not now", retry_after_seconds=2)] * TRIES)
    answer = await http.get(PATH)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    answer = await http.post(PATH)
    assert answer.status_code == 405


async def test_a_head_has_no_body(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    script(store, page(state(2, RUNNING), after="2"))
    answer = await http.head(PATH)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_a_store_that_is_away_for_a_while_is_asked_again(
    http: httpx2.AsyncClient, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_watch, "_RETRY_SECONDS", 0.01)
    away = [UnavailableError("not now")] * (TRIES + 1)
    script(store, page(state(2, RUNNING), after="2"), *away, END)
    answer = await http.get(PATH)
    assert b"\nid: 9\n" in answer.content
    assert asked(store) == ["", *["2"] * (TRIES + 2)]


async def test_something_is_sent_while_nothing_happens(
    http: httpx2.AsyncClient, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_watch, "HEARTBEAT_SECONDS", 0.02)
    gate = asyncio.Event()

    async def later(_: Any) -> Page:
        await gate.wait()
        return END

    script(store, page(state(2, RUNNING), after="2"), later)
    beats = 0
    async with http.stream("GET", PATH) as answer:
        async for line in answer.aiter_lines():
            beats += line == ":"
            if beats == 3:
                gate.set()
    assert beats >= 3


async def test_a_client_that_goes_away_is_not_waited_for(
    http: httpx2.AsyncClient, store: ScriptedStore
) -> None:
    ended = asyncio.Event()

    async def for_ever(_: Any) -> Page:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return END

    script(store, page(state(2, RUNNING), after="2"), for_ever)
    async with http.stream("GET", PATH) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("event:"):
                # Here, since leaving the loop lets the client hang up.
                await eventually(lambda: len(asked(store)) == 2)
                break
    async with asyncio.timeout(10):
        await ended.wait()


async def test_a_client_that_takes_nothing_holds_little(store: ScriptedStore) -> None:
    """Pages are asked for as they are taken: what lies in between is the kernel's buffers."""
    piece = results(b"x" * (256 * 1024 - 1) + b"\n", "2.1")
    script(store, *[page(piece, after="2.1")] * 200)
    settings = GatewaySettings(
        listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", store=f"127.0.0.1:{store.port}"
    )
    # One of its own, whose end is the stream's: it asks for no page of the next test.
    async with running(settings, SECRET) as gateway:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, ("127.0.0.1", gateway.http_port))
            await loop.sock_sendall(
                slow, f"GET {PATH} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
            )
            await _still(lambda: len(asked(store)))
            taken = len(asked(store))
    # At most 6 MiB in the kernel, and a page on each side of it.
    assert 2 <= taken <= 30
    store.forget()


async def _still(count: Callable[[], int]) -> None:
    """Wait until a count has not changed for a while."""
    last, since = count(), asyncio.get_running_loop().time()

    def unchanged() -> bool:
        nonlocal last, since
        now = asyncio.get_running_loop().time()
        if (current := count()) != last or current < 2:
            last, since = current, now
        return now - since > 0.5

    await eventually(unchanged)


async def test_the_same_over_grpc(channel: grpc.aio.Channel, store: ScriptedStore) -> None:
    stub = events_pb2_grpc.EventsStub(channel)
    script(
        store,
        page(state(2, RUNNING), after="2"),
        page(after="2"),
        page(results(b"{}\n", "3.1"), after="3.1"),
        END,
    )
    wanted = events_pb2.WatchBatchRequest(batch_id=batch_id(), include_results=True, after="1")
    told = [event async for event in stub.WatchBatch(wanted)]
    assert told == [state(2, RUNNING), results(b"{}\n", "3.1"), state(9, COMPLETED)]
    assert asked(store) == ["1", "2", "2", "3.1"]

    script(store, NotFoundError("No batch found with id 'x'."))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.WatchBatch(wanted).read()
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert isinstance(from_rpc_error(refused.value), NotFoundError)
    assert any(key == "x-request-id" for key, _ in refused.value.trailing_metadata())

    script(store, END)
    request = events_pb2.ReadBatchEventsRequest(watch=wanted, wait_ms=5)
    assert await stub.ReadBatchEvents(request) == END
    assert store.requests("ReadBatchEvents")[-1] == request


async def test_a_gateway_that_stops_sends_its_clients_on(store: ScriptedStore) -> None:
    async def for_ever(_: Any) -> Page:
        await asyncio.Event().wait()
        return END

    began = page(state(2, RUNNING), after="2")
    script(store, began, began, for_ever, for_ever)
    settings = GatewaySettings(
        listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", store=f"127.0.0.1:{store.port}"
    )
    async with contextlib.AsyncExitStack() as stack:
        gateway = running(settings, SECRET)
        listening = await gateway.__aenter__()
        http = await stack.enter_async_context(httpx2.AsyncClient(timeout=20))
        reading = asyncio.create_task(http.get(f"http://127.0.0.1:{listening.http_port}{PATH}"))
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(f"127.0.0.1:{listening.grpc_port}")
        )
        stub = events_pb2_grpc.EventsStub(channel)
        call = stub.WatchBatch(events_pb2.WatchBatchRequest(batch_id=batch_id()))
        assert await call.read() == state(2, RUNNING)
        await eventually(lambda: len(asked(store)) == 4)
        async with asyncio.timeout(5):
            await gateway.__aexit__(None, None, None)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        answer = await reading
    assert answer.content.endswith(b"\n\n")
    assert b"\nid: 2\n" in answer.content


async def test_each_page_is_json_or_a_comment(
    http: httpx2.AsyncClient, store: ScriptedStore
) -> None:
    script(store, page(state(2, RUNNING), after="2"), page(after="2"), END)
    for line in (await http.get(PATH)).text.split("\n"):
        name, _, value = line.partition(":")
        assert name in ("", "event", "id", "data", "retry")
        if name == "data":
            orjson.loads(value)
