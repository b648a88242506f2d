"""The schema, table by table. Whoever imports one module has all tables in its `metadata`."""

from services.store.tables import core, keys, ledgers, uploads, webhooks

__all__ = ["core", "keys", "ledgers", "uploads", "webhooks"]
