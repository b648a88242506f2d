"""Fixtures that every suite may ask for by name."""

from tests.kit.nats_server import nats_server
from tests.kit.postgres import postgres, postgres_url

__all__ = ["nats_server", "postgres", "postgres_url"]
