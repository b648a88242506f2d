"""Fixtures that every suite may ask for by name, and the order of files."""

import os

import hypothesis
import pytest
import structlog

from tests.kit.nats_server import nats_server
from tests.kit.postgres import all_store_databases, postgres, postgres_url, store_databases

__all__ = ["all_store_databases", "nats_server", "postgres", "postgres_url", "store_databases"]

# A machine that does other work is slow, and that is no fault of what is tried.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")

# Processes that tests start may be told where to die.
os.environ["NIGHTSHIFT_UNDER_TEST"] = "1"

# As processes log, without the values of variables: to draw those takes most of a second.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with files whose tests wait long: beside each other, nothing is waited for at the end.

    The order within a file stays, and so does that of files alike. Chaos, and real engines, each
    stay in one process: a second engine would find no core, and rounds would disturb each other.
    """
    for item in items:
        folder = item.path.parent
        if folder.name in ("chaos", "e2e"):
            item.add_marker(pytest.mark.xdist_group(folder.name))
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)
