"""Fixtures that every suite may ask for by name."""

from tests.kit.nats_server import nats_server

__all__ = ["nats_server"]
