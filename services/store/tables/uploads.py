"""Tables of uploads and of their parts, which go with the upload's end."""

from typing import Final

import sqlalchemy as sa

from services.store.tables.core import _BIG, _count, _id, _partial_index, _project, metadata

PENDING_WHERE: Final = "status = 'pending'"

uploads: Final = sa.Table(
    "uploads",
    metadata,
    _id(),
    _project(),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("filename", sa.Text, nullable=False),
    # As declared; the parts must add up to it.
    sa.Column("bytes", _BIG, nullable=False),
    sa.Column("created_at", _BIG, nullable=False),
    sa.Column("expires_at", _BIG, nullable=False),
    sa.Column("file_expires_seconds", _BIG),
    # Seeds the hashes of custom ids in all parts' indexes; secret, so that nobody can aim at them.
    sa.Column("hash_key", sa.String(64), nullable=False),
    # Parts as they came, and of their bytes those that no earlier part had word for word.
    _count("parts"),
    _count("stored_bytes"),
    _count("distinct_bytes"),
    sa.Column("ended_at", _BIG),
    sa.Column("file_id", sa.String(64)),
    # SHA-256 in hex of the request that completed it, by which a repeated one is known.
    sa.Column("completed_by", sa.String(64)),
    sa.CheckConstraint("status IN ('pending', 'completed', 'cancelled', 'expired')", name="status"),
    sa.CheckConstraint("(status = 'pending') = (ended_at IS NULL)", name="ended"),
    sa.CheckConstraint("(status = 'completed') = (file_id IS NOT NULL)", name="file"),
    sa.CheckConstraint("(file_id IS NULL) = (completed_by IS NULL)", name="completed_by"),
    sa.CheckConstraint("bytes >= 0", name="bytes"),
    _partial_index("ix_uploads_pending", ("expires_at",), PENDING_WHERE),
)

upload_parts: Final = sa.Table(
    "upload_parts",
    metadata,
    _id(),
    sa.Column("upload_id", sa.String(64), sa.ForeignKey("uploads.id"), nullable=False),
    _project(),
    sa.Column("bytes", _BIG, nullable=False),
    sa.Column("created_at", _BIG, nullable=False),
    sa.Column("blob", sa.String(200), nullable=False),
    # Of batch inputs only: where its lines lie.
    sa.Column("index_blob", sa.String(200)),
    # Tells a part that was sent again because its answer was lost.
    sa.Column("digest", sa.String(32), nullable=False),
    sa.CheckConstraint("bytes >= 0", name="bytes"),
    sa.Index(None, "upload_id", "digest"),
)
