"""Tables of API keys, and of the idempotency keys under which clients created something."""

from typing import Final

import sqlalchemy as sa

from services.store.tables.core import _BIG, _id, _project, metadata

api_keys: Final = sa.Table(
    "api_keys",
    metadata,
    _id(),
    # Which key was made first; a second may have many.
    sa.Column("seq", _BIG, nullable=False, unique=True),
    _project(),
    sa.Column("name", sa.String(100), nullable=False),
    # SHA-256 in hex. The key has 256 random bits, so that neither salt nor slowness adds anything.
    sa.Column("sha256", sa.String(64), nullable=False, unique=True),
    sa.Column("prefix", sa.String(16), nullable=False),
    sa.Column("last_four", sa.String(4), nullable=False),
    sa.Column("requests_per_minute", _BIG),
    sa.Column("created_at", _BIG, nullable=False),
    sa.Column("revoked_at", _BIG),
    sa.CheckConstraint("requests_per_minute > 0", name="requests_per_minute"),
)
"""Rows stay when a key is revoked: what it created names it, and the store stays closed."""

idempotency_keys: Final = sa.Table(
    "idempotency_keys",
    metadata,
    sa.Column("project_id", sa.String(64), sa.ForeignKey("projects.id"), primary_key=True),
    sa.Column("key", sa.String(255), primary_key=True),
    # SHA-256 in hex of all that makes the request what it is.
    sa.Column("fingerprint", sa.String(64), nullable=False),
    sa.Column("object_id", sa.String(64), nullable=False),
    sa.Column("created_ms", _BIG, nullable=False),
    sa.Index(None, "created_ms"),
)
