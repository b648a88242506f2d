"""Fixtures that every suite may ask for by name."""

from tests.kit.nats_server import nats_server
from tests.kit.postgres import all_store_databases, postgres, postgres_url, store_databases

__all__ = ["all_store_databases", "nats_server", "postgres", "postgres_url", "store_databases"]
