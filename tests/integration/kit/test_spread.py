"""One channel to several stores, of which some are killed, frozen, drained or not there."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from protos.nightshift.v1 import batches_pb2, batches_pb2_grpc, files_pb2, files_pb2_grpc
from services.kit.calls import channels, peers, rpc
from services.kit.calls.interceptors import ErrorsInterceptor
from services.kit.wire.errors import UnavailableError
from tests.integration.kit import echo
from tests.kit.eventually import eventually
from tests.kit.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FAILOVER_SECONDS = 1.0
LOAD_SECONDS = 2.0
"""What a busy machine may take on top."""

PLANT = """
import asyncio, sys
import grpc
from protos.nightshift.v1 import batches_pb2, batches_pb2_grpc, files_pb2, files_pb2_grpc
from services.kit.calls import rpc
from services.kit.process import service

# A service reads no words.
ADDRESS = sys.argv.pop()

class Store(batches_pb2_grpc.BatchesServicer, files_pb2_grpc.FilesServicer):
    async def GetBatch(self, request, context):
        if request.batch_id == "slow":
            await asyncio.sleep(1.5)
        return batches_pb2.GetBatchResponse(batch=batches_pb2.Batch(id=ADDRESS))

    async def CreateBatch(self, request, context):
        return batches_pb2.CreateBatchResponse(batch=batches_pb2.Batch(id=ADDRESS))

    async def ReadFile(self, request, context):
        for _ in range(20):
            yield files_pb2.ReadFileResponse(data=ADDRESS.encode())
            await asyncio.sleep(0.05)

async def serve(stopping):
    store = Store()
    adders = {
        "Batches": batches_pb2_grpc.add_BatchesServicer_to_server,
        "Files": files_pb2_grpc.add_FilesServicer_to_server,
    }
    entries = [rpc.ServiceEntry(f"nightshift.v1.{name}", store, adders[name]) for name in adders]
    server = await rpc.start_server(ADDRESS, entries, [])
    await stopping.wait()
    await server.drain(5)

service.run("plant", serve)
"""


class Plant:
    """A small store as a process; its answers carry its address."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", PLANT, self.address])

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def wait(self) -> None:
        assert self._process is not None
        assert self._process.wait(20) == 0

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def plants() -> Iterator[list[Plant]]:
    """Two of them, which every test leaves running."""
    found = [Plant(), Plant()]
    try:
        for plant in found:
            plant.start()
        yield found
    finally:
        for plant in found:
            plant.kill()


@pytest.fixture
async def channel(plants: list[Plant]) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to both, each of which serves."""
    for plant in plants:
        async with rpc.open_channel(plant.address) as one:
            await eventually(lambda one=one: rpc.is_serving(one), within_seconds=20)
    async with rpc.open_channel(",".join(plant.address for plant in plants)) as opened:
        await eventually(lambda: both_answer(opened))
        yield opened


async def get(channel: grpc.aio.Channel, how: str = "") -> str:
    """Make a call that may be repeated; return who answered."""
    stub = batches_pb2_grpc.BatchesStub(channel)
    return (await stub.GetBatch(batches_pb2.GetBatchRequest(batch_id=how))).batch.id


async def both_answer(channel: grpc.aio.Channel) -> bool:
    """Tell whether calls at once are spread over two."""
    return len(set(await asyncio.gather(*(get(channel) for _ in range(4))))) == 2


async def create(channel: grpc.aio.Channel) -> str:
    """Make one that is never repeated."""
    stub = batches_pb2_grpc.BatchesStub(channel)
    return (await stub.CreateBatch(batches_pb2.CreateBatchRequest())).batch.id


def other(plants: list[Plant], address: str) -> Plant:
    [found] = [plant for plant in plants if plant.address != address]
    return found


def of(plants: list[Plant], address: str) -> Plant:
    [found] = [plant for plant in plants if plant.address == address]
    return found


async def test_calls_that_follow_one_another_stay_and_those_at_once_are_spread(
    plants: list[Plant], channel: grpc.aio.Channel
) -> None:
    assert len({await get(channel) for _ in range(10)}) == 1
    answers = await asyncio.gather(*(get(channel, "slow") for _ in range(10)))
    assert sorted(map(answers.count, set(answers))) == [5, 5]


async def test_a_killed_store_is_left_at_once_and_found_again(
    plants: list[Plant], channel: grpc.aio.Channel
) -> None:
    first = of(plants, await get(channel))
    waiting = asyncio.create_task(get(channel, "slow"))
    await asyncio.sleep(0)
    first.kill()
    began = time.monotonic()
    assert await get(channel) == other(plants, first.address).address
    assert await create(channel) == other(plants, first.address).address
    assert time.monotonic() - began < FAILOVER_SECONDS
    # Whoever it was sent to: it was repeated where that one is gone.
    assert await waiting == other(plants, first.address).address
    first.start()
    await eventually(lambda: both_answer(channel), within_seconds=20)


async def test_what_never_left_goes_to_another_store_though_it_may_not_be_repeated(
    plants: list[Plant], channel: grpc.aio.Channel
) -> None:
    first = of(plants, await create(channel))
    # The connection's end was not noticed when the call is made.
    first.kill()
    answered = why = ""
    try:
        answered = await create(channel)
    except grpc.aio.AioRpcError as fault:
        # It had left; who knows whether it was read.
        why = str(fault.details())
    assert answered or not why.startswith("failed to connect"), why
    assert answered in ("", other(plants, first.address).address)
    first.start()
    await eventually(lambda: both_answer(channel), within_seconds=20)


async def test_a_frozen_store_is_left_within_a_second(
    plants: list[Plant], channel: grpc.aio.Channel
) -> None:
    first = of(plants, await get(channel))
    first.send(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert await get(channel) == other(plants, first.address).address
        assert time.monotonic() - began < FAILOVER_SECONDS + LOAD_SECONDS
        began = time.monotonic()
        for _ in range(20):
            assert await create(channel) == other(plants, first.address).address
        assert time.monotonic() - began < FAILOVER_SECONDS
    finally:
        first.send(signal.SIGCONT)
    await eventually(lambda: both_answer(channel))


async def next_piece(read: Any) -> bytes:
    """Return what comes next of a file's content; nothing at its end."""
    answer = await read.read()
    return b"" if answer is grpc.aio.EOF else answer.data


async def test_a_stream_on_a_frozen_store_breaks(
    plants: list[Plant], channel: grpc.aio.Channel
) -> None:
    read = files_pb2_grpc.FilesStub(channel).ReadFile(files_pb2.ReadFileRequest())
    first = of(plants, (await next_piece(read)).decode())

    async def to_its_end() -> None:
        while await read.read() is not grpc.aio.EOF:
            pass

    first.send(signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await to_its_end()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < channels.SPREAD_KEEPALIVE_SECONDS + 3 + LOAD_SECONDS
    finally:
        first.send(signal.SIGCONT)
    await eventually(lambda: both_answer(channel))


async def test_a_slow_answer_is_waited_for(plants: list[Plant], channel: grpc.aio.Channel) -> None:
    first = await get(channel)
    assert await get(channel, "slow") == first


async def test_a_drained_store_loses_no_call(
    plants: list[Plant], channel: grpc.aio.Channel
) -> None:
    first = of(plants, await get(channel))
    read = files_pb2_grpc.FilesStub(channel).ReadFile(files_pb2.ReadFileRequest())
    frames = [await next_piece(read)]
    ends = asyncio.get_running_loop().time() + 3.0
    answered: set[str] = set()

    async def calls() -> None:
        while asyncio.get_running_loop().time() < ends:
            answered.add(await create(channel))

    running = [asyncio.create_task(calls()) for _ in range(4)]
    await asyncio.sleep(0)
    first.send(signal.SIGTERM)
    await asyncio.gather(*running)
    assert other(plants, first.address).address in answered
    # The stream that was open there was given its time.
    while piece := await next_piece(read):
        frames.append(piece)
    assert len(frames) == 20
    await asyncio.to_thread(first.wait)
    first.start()
    async with rpc.open_channel(first.address) as one:
        await eventually(lambda: rpc.is_serving(one), within_seconds=20)


async def test_a_stream_goes_to_a_store_that_serves(plants: list[Plant]) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    async with rpc.open_channel(f"{nobody},{plants[0].address}") as channel:
        await channel.channel_ready()
        read = files_pb2_grpc.FilesStub(channel).ReadFile(files_pb2.ReadFileRequest())
        assert (await next_piece(read)).decode() == plants[0].address
        read.cancel()


async def test_a_fault_that_a_store_tells_is_told_on_and_others_are_tried(
    plants: list[Plant],
) -> None:
    busy, fine = echo.Raising(), echo.Raising()
    busy.fault = UnavailableError("busy")
    servers = [await echo.start(each, [ErrorsInterceptor()]) for each in (busy, fine)]
    async with rpc.open_channel(
        ",".join(f"127.0.0.1:{server.port}" for server in servers)
    ) as channel:
        for _ in range(4):
            await echo.repeatable(channel)
        fine.fault = UnavailableError("busy")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await echo.unary(channel)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert busy.calls.get("CreateBatch", 0) + fine.calls.get("CreateBatch", 0) == 1
    for server in servers:
        await server.server.stop(0)


async def test_nobody_there_is_said_when_the_deadline_is_over() -> None:
    nobody = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    async with rpc.open_channel(nobody) as channel:
        began = time.monotonic()
        stub = batches_pb2_grpc.BatchesStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetBatch(batches_pb2.GetBatchRequest(), timeout=0.7)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert 0.6 < time.monotonic() - began < 0.7 + LOAD_SECONDS


async def test_a_name_is_looked_up(plants: list[Plant]) -> None:
    port = plants[0].address.rpartition(":")[2]
    async with rpc.open_channel(f"localhost:{port},nowhere.invalid:{port}") as channel:
        assert await get(channel) == plants[0].address


async def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [echo.Raising(), echo.Raising()]
    port = free_port()
    servers = [
        await echo.start(each, [ErrorsInterceptor()], f"127.0.0.{number}:{port}")
        for number, each in enumerate(stores, 1)
    ]
    # The name server's answer, the one thing here that is not real.
    answer = ["127.0.0.1", "127.0.0.2"]

    async def looked_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        assert host == "stores.example"
        return [(None, None, 0, "", (address, port)) for address in answer]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", looked_up)
    monkeypatch.setattr(peers, "RESOLVE_SECONDS", 0.1)
    async with rpc.open_channel(f"stores.example:{port}") as channel:

        async def both() -> bool:
            await asyncio.gather(*(echo.unary(channel) for _ in range(4)))
            return all(each.calls.get("CreateBatch") for each in stores)

        await eventually(both)
        del answer[0]
        calls = stores[0].calls["CreateBatch"]

        async def only_the_other() -> bool:
            nonlocal calls
            before, calls = calls, stores[0].calls["CreateBatch"]
            await asyncio.gather(*(echo.unary(channel) for _ in range(4)))
            return stores[0].calls["CreateBatch"] == before

        await eventually(only_the_other, every_seconds=0.1)
    for server in servers:
        await server.server.stop(0)


@pytest.mark.parametrize("text", ["", ",", "store", ":1", "store:", "store:x", "a:1,b"])
def test_what_is_no_list_of_addresses_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        channels.open_channel(text)
