"""Fixtures of the tests of `Work` and of webhooks."""

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.kit.calls.rpc import POLICIES
from services.store.webhooks.sender import Sender
from tests.integration.store_work.harness import Store, databases, running
from tests.integration.store_work.webhooks import Project
from tests.kit.postgres import StoreDatabases
from tests.kit.webhook_receiver import Receiver, running_receiver

# What says something about SQL, and not only about gRPC or files.
_ON_BOTH = (
    "test_attempts",
    "test_away",
    "test_ending",
    "test_events",
    "test_file_expiry",
    "test_finalizing",
    "test_leadership",
    "test_losses",
    "test_lost_results",
    "test_mixed",
    "test_odd_text",
    "test_quarantine",
    "test_reclaim",
    "test_results",
    "test_sweeping",
    "test_upload_expiry",
    "test_webhook_deliveries",
    "test_whole_path",
    "test_window",
)


# They measure this process, and take long.
_ON_ONE = ("test_memory_does_not_grow_with_the_results",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of these modules on both databases."""
    on_both = metafunc.module.__name__.rpartition(".")[2] in _ON_BOTH
    if on_both and metafunc.function.__name__ not in _ON_ONE:
        metafunc.parametrize("database", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture(autouse=True)
def database(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have stores of this process use SQLite, or PostgreSQL where the test is run on it."""
    if getattr(request, "param", "sqlite") == "postgresql":
        theirs: StoreDatabases = request.getfixturevalue("store_databases")
        databases.make = theirs.take
    yield
    databases.make = None


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


@pytest.fixture
def patient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no call run out of time: where time is the test's own, a busy machine is no fault."""
    for call, policy in list(POLICIES.items()):
        if policy.timeout_seconds is not None:
            monkeypatch.setitem(POLICIES, call, replace(policy, timeout_seconds=600))
