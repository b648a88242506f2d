"""Tables of webhooks: who is told of a batch's end, and what is still to be told."""

from typing import Final

import sqlalchemy as sa

from services.store.tables.core import _BIG, _id, _partial_index, _project, metadata

PENDING: Final = "pending"
DELIVERED: Final = "delivered"
GIVEN_UP: Final = "given_up"

# The loop's questions, word for word: SQLite takes a partial index only for the same condition.
PENDING_WHERE: Final = "state = 'pending'"
ENDED_WHERE: Final = "state <> 'pending'"
LIVE_WHERE: Final = "deleted_at IS NULL"

webhook_endpoints: Final = sa.Table(
    "webhook_endpoints",
    metadata,
    _id(),
    sa.Column("seq", _BIG, nullable=False, unique=True),
    _project(),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("event_types", sa.JSON, nullable=False),
    # [[secret, until_ms or null], …], newest first: all that are live sign. Emptied by deletion.
    sa.Column("secrets", sa.JSON, nullable=False),
    sa.Column("created_at", _BIG, nullable=False),
    sa.Column("updated_at", _BIG, nullable=False),
    sa.Column("deleted_at", _BIG),
    sa.Index(None, "project_id", "seq"),
    _partial_index("ix_webhook_endpoints_live", ("id", "project_id"), LIVE_WHERE),
)

deliveries: Final = sa.Table(
    "deliveries",
    metadata,
    # The header `webhook-id` of every attempt.
    _id(),
    sa.Column("seq", _BIG, nullable=False, unique=True),
    _project(),
    sa.Column("endpoint_id", sa.String(64), sa.ForeignKey("webhook_endpoints.id"), nullable=False),
    sa.Column("event_id", sa.String(64), nullable=False),
    sa.Column("event_type", sa.String(32), nullable=False),
    sa.Column("batch_id", sa.String(64), sa.ForeignKey("batches.id"), nullable=False),
    # Byte for byte what is signed and sent.
    sa.Column("payload", sa.Text, nullable=False),
    sa.Column("created_at", _BIG, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    # When the 72 hours began, and attempts since.
    sa.Column("since_ms", _BIG, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
    sa.Column("next_ms", _BIG),
    sa.Column("lease_holder", sa.String(64)),
    sa.Column("lease_until_ms", _BIG),
    sa.Column("last_status", sa.Integer),
    sa.Column("last_error", sa.Text),
    sa.Column("ended_ms", _BIG),
    sa.UniqueConstraint("endpoint_id", "event_id"),
    sa.CheckConstraint(f"state IN ('{PENDING}', '{DELIVERED}', '{GIVEN_UP}')", name="state"),
    sa.CheckConstraint("(state = 'pending') = (next_ms IS NOT NULL)", name="next"),
    sa.CheckConstraint("(state = 'pending') = (ended_ms IS NULL)", name="ended"),
    sa.CheckConstraint(
        "(lease_holder IS NULL) = (lease_until_ms IS NULL)"
        " AND (lease_holder IS NULL OR state = 'pending')",
        name="lease",
    ),
    sa.Index(None, "project_id", "seq"),
    sa.Index(None, "project_id", "event_id"),
    _partial_index("ix_deliveries_pending", ("next_ms",), PENDING_WHERE),
    _partial_index("ix_deliveries_pending_of_endpoint", ("endpoint_id", "next_ms"), PENDING_WHERE),
    _partial_index("ix_deliveries_ended", ("ended_ms",), ENDED_WHERE),
)
"""One row for each endpoint and event, written in the transaction that ends the batch."""
