"""A server that is to stop: those who watch it hear so before anything of it is gone."""

from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.kit.calls import rpc
from tests.integration.kit import echo

pytestmark = pytest.mark.integration

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_server_that_drains_says_so_first() -> None:
    server = await echo.start(echo.Raising(), [])
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answers = aiter(stub.Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(answers)).status == SERVING
        await server.drain(5.0)
        # An end without a word would be all that a killed one says.
        assert [answer.status async for answer in answers] == [NOT_SERVING]
