"""The store's own connection to the bus."""

import asyncio
from pathlib import Path

import pytest

from services.kit.messages.bus import Bus
from services.kit.process.tasks import end
from services.store.bus.bus_link import keep_bus
from services.store.bus.outbox import Outbox
from services.store.db.database import Database
from services.store.settings import StoreSettings
from tests.kit.nats_server import NatsServer

pytestmark = pytest.mark.integration


async def test_streams_are_seen_to_whatever_that_raises(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0
    ensure = Bus.ensure_streams

    async def fails_at_first(bus: Bus) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("unforeseen")
        await ensure(bus)

    monkeypatch.setattr(Bus, "ensure_streams", fails_at_first)
    db = Database(f"sqlite:///{tmp_path / 'test.db'}")
    woken = asyncio.Event()
    settings = StoreSettings(nats_url=nats_server.url)
    keeping = asyncio.create_task(keep_bus(settings, None, Outbox(db), woken.set))
    try:
        async with asyncio.timeout(30):
            await woken.wait()
    finally:
        await end(keeping)
        db.close()
    assert tries == 2
