"""The bus against a real nats-server."""

import pytest

from services.kit import bus
from tests.kit.nats_server import NatsServer

pytestmark = pytest.mark.integration


async def test_streams_are_made_once_and_again_without_harm(nats_server: NatsServer) -> None:
    connection = await bus.connect(nats_server.url, "test")
    await connection.ensure_streams()
    await connection.ensure_streams()
    assert await connection.beats() == []
    await connection.close()
