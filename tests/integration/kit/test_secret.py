"""Only services get in: each call must bring the fleet's secret, but for health and reflection."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.kit.calls import rpc
from services.kit.calls.interceptors import ErrorsInterceptor, SecretInterceptor
from tests.integration.kit import echo

pytestmark = pytest.mark.integration

SECRET = "0123456789abcdef" * 4
Call = Callable[..., Awaitable[None]]
shapes = pytest.mark.parametrize("call", echo.SHAPES, ids=lambda one: str(one.__name__))


@pytest.fixture
def servicer() -> echo.Raising:
    return echo.Raising()


@pytest.fixture
async def channel(servicer: echo.Raising) -> AsyncIterator[grpc.aio.Channel]:
    server = await echo.start(servicer, [SecretInterceptor(SECRET), ErrorsInterceptor()])
    channel = rpc.open_channel(f"127.0.0.1:{server.port}")
    yield channel
    await channel.close()
    await server.drain(0)


@shapes
async def test_the_secret_opens(
    servicer: echo.Raising, channel: grpc.aio.Channel, call: Call
) -> None:
    await call(channel, rpc.metadata(SECRET, project_id="default"))
    assert sum(servicer.calls.values()) == 1


@shapes
@pytest.mark.parametrize(
    "metadata",
    [
        None,
        rpc.metadata(""),
        rpc.metadata(SECRET[:-1]),
        rpc.metadata(SECRET + "0"),
        rpc.metadata(SECRET.upper()),
        (("authorization", SECRET),),
    ],
    ids=["none", "empty", "shorter", "longer", "other case", "elsewhere"],
)
async def test_nothing_else_does(
    servicer: echo.Raising, channel: grpc.aio.Channel, call: Call, metadata: Any
) -> None:
    with pytest.raises(rpc.CallFault) as raised:
        await call(channel, metadata)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert SECRET not in str(raised.value)
    assert servicer.calls == {}


async def test_probes_need_no_secret(channel: grpc.aio.Channel) -> None:
    assert await rpc.is_serving(channel)


async def test_reflection_needs_no_secret(channel: grpc.aio.Channel) -> None:
    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    async for answer in stub.ServerReflectionInfo(ask()):
        names = {one.name for one in answer.list_services_response.service}
        assert names >= {"nightshift.v1.Work", "grpc.health.v1.Health"}
