"""Calls follow their policy: what may be repeated is, a service that is away is waited for."""

import asyncio

import grpc
import pytest

from services.kit.calls import rpc
from services.kit.calls.interceptors import ErrorsInterceptor
from services.kit.process.settings import SettingsError
from services.kit.wire import errors
from tests.integration.kit import echo

pytestmark = pytest.mark.integration


async def test_a_repeatable_call_is_tried_again_while_unavailable() -> None:
    servicer = echo.Raising()
    servicer.fault, servicer.faults_left = errors.UnavailableError("starting"), 2
    server = await echo.start(servicer, [ErrorsInterceptor()])
    channel = rpc.open_channel(f"127.0.0.1:{server.port}")
    try:
        await echo.repeatable(channel)
    finally:
        await channel.close()
        await server.drain(0)
    assert servicer.calls == {"GetBatch": 3}


async def test_a_call_that_may_have_done_something_is_made_once() -> None:
    servicer = echo.Raising()
    servicer.fault = errors.UnavailableError("starting")
    server = await echo.start(servicer, [ErrorsInterceptor()])
    channel = rpc.open_channel(f"127.0.0.1:{server.port}")
    try:
        with pytest.raises(rpc.CallFault):
            await echo.unary(channel)
    finally:
        await channel.close()
        await server.drain(0)
    assert servicer.calls == {"CreateBatch": 1}


async def test_an_error_that_repeating_cannot_help_is_not_repeated() -> None:
    servicer = echo.Raising()
    servicer.fault = errors.NotFoundError("gone")
    server = await echo.start(servicer, [ErrorsInterceptor()])
    channel = rpc.open_channel(f"127.0.0.1:{server.port}")
    try:
        with pytest.raises(rpc.CallFault):
            await echo.repeatable(channel)
    finally:
        await channel.close()
        await server.drain(0)
    assert servicer.calls == {"GetBatch": 1}


@pytest.mark.parametrize("given", ["{},", " {}", "{} , ,"])
async def test_a_list_of_one_address_is_that_address(given: str) -> None:
    """As the settings take it."""
    server = await echo.start(echo.Raising(), [ErrorsInterceptor()])
    async with rpc.open_channel(given.format(f"127.0.0.1:{server.port}")) as channel:
        assert await rpc.is_serving(channel, timeout_seconds=10)
    await server.drain(0)


async def test_a_restarting_service_is_waited_for() -> None:
    servicer = echo.Raising()
    server = await echo.start(servicer, [ErrorsInterceptor()])
    port = server.port
    channel = rpc.open_channel(f"127.0.0.1:{port}")
    try:
        await echo.repeatable(channel)
        await server.drain(0)
        waiting = asyncio.create_task(echo.repeatable(channel))
        # It has found nobody by the time that the channel says so.
        async with asyncio.timeout(5):
            while channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await channel.wait_for_state_change(channel.get_state())
        assert not waiting.done()
        server = await echo.start(servicer, [ErrorsInterceptor()], f"127.0.0.1:{port}")
        async with asyncio.timeout(5):
            await waiting
    finally:
        await channel.close()
        await server.drain(0)
    assert servicer.calls == {"GetBatch": 2}


async def test_a_port_is_bound_once() -> None:
    server = await echo.start(echo.Raising(), [])
    try:
        with pytest.raises(SettingsError, match="Address already in use"):
            await echo.start(echo.Raising(), [], f"127.0.0.1:{server.port}")
    finally:
        await server.drain(0)
