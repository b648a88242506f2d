"""Fixtures of the tests of `Work`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.store_work.harness import Store, running


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    """Run a store with a registered executor."""
    async with running(tmp_path / "data") as store:
        yield store
