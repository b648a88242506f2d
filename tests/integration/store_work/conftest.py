"""Fixtures of the tests of `Work` and of webhooks."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.store.webhook_sender import Sender
from tests.integration.store_work.harness import Store, running
from tests.integration.store_work.webhooks import Project
from tests.kit.webhook_receiver import Receiver, running_receiver


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    """Run a store with a registered executor."""
    async with running(tmp_path / "data", webhooks_allow_private=True) as store:
        yield store


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """Run a receiver of webhooks."""
    async with running_receiver() as started:
        yield started


@pytest.fixture
async def project(store: Store) -> AsyncIterator[Project]:
    """Return a project whose webhooks may go to this machine."""
    # The official client refuses signatures of another time.
    store.clock.advance(time.time() - store.clock.now())
    async with Sender(allow_private=True, timeout_seconds=5) as sender:
        yield Project(store, sender)
