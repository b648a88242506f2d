"""One whole system for all tests that hold it to the contract from outside."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from services.cli.shared.admin_calls import put_models
from tests.kit.up import RunningUp, running_up

LINE_TIMEOUT_SECONDS = 8.0
STALL_SECONDS = 0.6
MODELS = ("simulated", "poison", "stuck")
"""Each with an executor of its own, so that what kills one leaves the others alone."""
NOBODY = "nobody"
"""A model that is known and has no executor."""
MAX_LINE_BYTES = 4 << 20
MAX_RESULT_BYTES = 40 << 20
MAX_BATCH_FILE_BYTES = 24 << 20
MAX_FILE_BYTES = 28 << 20
"""Far below the defaults, so that what lies past them is quickly made."""


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    """Run `nightshift up` with simulated engines and short limits."""
    arguments = ["--engine", "simulated", *(f"--model={name}" for name in MODELS)]
    environment = {
        "NIGHTSHIFT_GATEWAY_COMPLETION_WINDOWS": "24h,2s,6s",
        "NIGHTSHIFT_EXECUTOR_LINE_TIMEOUT_SECONDS": str(LINE_TIMEOUT_SECONDS),
        "NIGHTSHIFT_EXECUTOR_STALL_SECONDS": str(STALL_SECONDS),
        "NIGHTSHIFT_STORE_MAX_LINE_BYTES": str(MAX_LINE_BYTES),
        "NIGHTSHIFT_STORE_MAX_RESULT_BYTES": str(MAX_RESULT_BYTES),
        "NIGHTSHIFT_STORE_MAX_BATCH_FILE_BYTES": str(MAX_BATCH_FILE_BYTES),
        "NIGHTSHIFT_STORE_MAX_FILE_BYTES": str(MAX_FILE_BYTES),
        # Receivers of webhooks listen on this machine.
        "NIGHTSHIFT_STORE_WEBHOOKS_ALLOW_PRIVATE": "true",
    }
    data = tmp_path_factory.mktemp("contract") / "data"
    with running_up(data, arguments, environment) as running:
        store = json.loads((data / "addresses.json").read_text())["store"]
        asyncio.run(put_models(store, (data / "secret").read_text().strip(), [NOBODY]))
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def openai_client(system: RunningUp) -> AsyncIterator[AsyncOpenAI]:
    """The official client, as a user makes it."""
    async with AsyncOpenAI(base_url=system.base_url, api_key="anything") as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http(system: RunningUp) -> AsyncIterator[httpx2.AsyncClient]:
    """Plain HTTP, for what no client sends or shows."""
    async with httpx2.AsyncClient(base_url=system.url, timeout=30) as client:
        yield client
