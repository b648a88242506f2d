"""Tables. The schema repeats the invariants, so that a bug fails loudly instead of drifting.

`_at` columns are whole Unix seconds, as clients see them; `_ms` columns are milliseconds, for
decisions. Models, pools, executors and leadership belong to the fleet; all else has a project.
"""

from typing import Final

import sqlalchemy as sa

metadata: Final = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite gives only INTEGER keys a row number of their own.
_BIG: Final = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_END_STATES: Final = ("failed", "completed", "expired", "cancelled")


def _id() -> sa.Column[str]:
    return sa.Column("id", sa.String(64), primary_key=True)


def _project() -> sa.Column[str]:
    return sa.Column("project_id", sa.String(64), sa.ForeignKey("projects.id"), nullable=False)


def _batch(*, primary_key: bool = False) -> sa.Column[str]:
    return sa.Column(
        "batch_id",
        sa.String(64),
        sa.ForeignKey("batches.id"),
        nullable=False,
        primary_key=primary_key,
    )


def _partial_index(name: str, columns: tuple[str, ...], where: str) -> sa.Index:
    return sa.Index(name, *columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


# The loops' questions, word for word: SQLite takes a partial index only for the same condition.
WINDOW_WHERE: Final = (
    "status = 'in_progress' AND lines_cut < lines_total"
    " AND sealed_ms IS NULL AND stopping_ms IS NULL"
)
EXPIRY_WHERE: Final = "status IN ('validating', 'in_progress') AND stopping_ms IS NULL"
STOPPING_WHERE: Final = "stopping_ms IS NOT NULL AND sealed_ms IS NULL"
SEALED_WHERE: Final = "sealed_ms IS NOT NULL AND cleared_ms IS NULL"
DELETED_WHERE: Final = "deleted_at IS NOT NULL AND purged_at IS NULL"
EXPIRING_WHERE: Final = "expires_at IS NOT NULL AND purged_at IS NULL"
HELD_WHERE: Final = "deleted_at IS NULL AND purged_at IS NULL"
OPEN_WHERE: Final = "status NOT IN ('completed','failed','expired','cancelled')"
FINALIZE_WHERE: Final = "sealed_ms IS NOT NULL AND status IN ('finalizing', 'cancelling')"


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, _BIG, nullable=False, server_default="0")


counters: Final = sa.Table(
    "counters",
    metadata,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("n", _BIG, nullable=False),
)
"""Rows whose lock makes order of number the order of commit."""

projects: Final = sa.Table(
    "projects",
    metadata,
    _id(),
    sa.Column("created_at", _BIG, nullable=False),
    # Most bytes that its files may have together; null means what the setting says.
    sa.Column("quota_bytes", _BIG),
)

pools: Final = sa.Table(
    "pools",
    metadata,
    _id(),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("engine_revision", sa.String(64)),
    sa.Column("created_at", _BIG, nullable=False),
    # What the scheduler last said of its executors (`PoolReport`), and when; null before that.
    sa.Column("executors_alive", _BIG),
    sa.Column("executors_ready", _BIG),
    sa.Column("seats", _BIG),
    sa.Column("lines_per_second", sa.Float),
    sa.Column("reported_ms", _BIG),
    # Why an engine of it does not start, in the engine's own words; null where none is in trouble.
    sa.Column("trouble", sa.Text),
)

models: Final = sa.Table(
    "models",
    metadata,
    sa.Column("name", sa.String(512), primary_key=True),
    sa.Column("pool_id", sa.String(64), sa.ForeignKey("pools.id"), nullable=False),
    sa.Column("endpoints", sa.JSON, nullable=False),
    sa.Column("context_length", _BIG),
    sa.Column("created_at", _BIG, nullable=False),
)

executors: Final = sa.Table(
    "executors",
    metadata,
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("incarnation", sa.String(64), nullable=False),
    sa.Column("pool_id", sa.String(64), sa.ForeignKey("pools.id"), nullable=False),
    sa.Column("engine_revision", sa.String(64), nullable=False),
    sa.Column("registered_at", _BIG, nullable=False),
)

sweep_holds: Final = sa.Table(
    "sweep_holds",
    metadata,
    _id(),
    sa.Column("until_ms", _BIG, nullable=False),
)
"""While one stands, no blob is deleted: a backup copies what its snapshot names."""

leadership: Final = sa.Table(
    "leadership",
    metadata,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("holder", sa.String(128), nullable=False),
    sa.Column("term", _BIG, nullable=False),
    sa.Column("until_ms", _BIG, nullable=False),
)

blobs: Final = sa.Table(
    "blobs",
    metadata,
    sa.Column("name", sa.String(200), primary_key=True),
    _project(),
    # pending: announced, perhaps being written; live: named by a row; doomed: to be deleted.
    sa.Column("state", sa.String(8), nullable=False),
    # When it was announced, or given up without having been named.
    sa.Column("created_ms", _BIG, nullable=False),
    sa.CheckConstraint("state IN ('pending', 'live', 'doomed')", name="state"),
    sa.Index(None, "state", "created_ms"),
)

files: Final = sa.Table(
    "files",
    metadata,
    _id(),
    sa.Column("seq", _BIG, nullable=False, unique=True),
    _project(),
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("bytes", _BIG, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("created_at", _BIG, nullable=False),
    sa.Column("expires_at", _BIG),
    # [[blob name, bytes], …] in order: a file is a list of immutable parts.
    sa.Column("parts", sa.JSON, nullable=False),
    sa.Column("index_blob", sa.String(200)),
    sa.Column("deleted_at", _BIG),
    # When its blobs were given up, after it was deleted or had expired.
    sa.Column("purged_at", _BIG),
    # End files only: what makes a second one of a kind impossible.
    sa.Column("of_batch_id", sa.String(64)),
    sa.Column("of_kind", sa.String(8)),
    sa.UniqueConstraint("of_batch_id", "of_kind"),
    sa.CheckConstraint("bytes >= 0", name="bytes"),
    sa.Index(None, "project_id", "seq"),
    # What is to be purged, however many files there ever were.
    _partial_index("ix_files_deleted", ("deleted_at",), DELETED_WHERE),
    _partial_index("ix_files_expiring", ("expires_at",), EXPIRING_WHERE),
    # Covers the sum that a quota is compared with.
    _partial_index("ix_files_held", ("project_id", "bytes", "expires_at"), HELD_WHERE),
)

batches: Final = sa.Table(
    "batches",
    metadata,
    _id(),
    sa.Column("seq", _BIG, nullable=False, unique=True),
    _project(),
    # Number of the last commit that changed its status or counts: the id of that event.
    sa.Column("version", _BIG, nullable=False, server_default="1"),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("endpoint", sa.String(64), nullable=False),
    sa.Column("input_file_id", sa.Text, nullable=False),
    sa.Column("completion_window", sa.String(16), nullable=False),
    sa.Column("metadata", sa.JSON),
    sa.Column("output_expires_seconds", _BIG),
    # Of the API key that created it; null where none was configured.
    sa.Column("key_id", sa.String(64)),
    sa.Column("created_at", _BIG, nullable=False),
    sa.Column("expires_ms", _BIG, nullable=False),
    sa.Column("in_progress_at", _BIG),
    sa.Column("finalizing_at", _BIG),
    sa.Column("completed_at", _BIG),
    sa.Column("failed_at", _BIG),
    sa.Column("expired_at", _BIG),
    sa.Column("cancelling_at", _BIG),
    sa.Column("cancelled_at", _BIG),
    # When executors were told to stop (cancel or expiry); the seal follows within 2 s.
    sa.Column("stopping_ms", _BIG),
    # Known from validation on; parts of its own, so that deleting the file is harmless.
    sa.Column("model", sa.String(512)),
    sa.Column("pool_id", sa.String(64)),
    # Of several models: pool and model are the first one's, the cursors are in `batch_models`.
    sa.Column("mixed", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("input_parts", sa.JSON),
    sa.Column("index_blob", sa.String(200)),
    sa.Column("errors", sa.JSON),
    _count("lines_total"),
    _count("lines_cut"),
    _count("lines_done"),
    _count("completed"),
    _count("failed"),
    _count("input_bytes"),
    _count("input_tokens"),
    _count("cached_tokens"),
    _count("output_tokens"),
    _count("reasoning_tokens"),
    # Sealed: takes no more results. The outcome is the end state that finalizing leads to.
    sa.Column("sealed_ms", _BIG),
    sa.Column("seal_outcome", sa.String(16)),
    sa.Column("output_file_id", sa.String(64)),
    sa.Column("error_file_id", sa.String(64)),
    sa.Column("finalize_holder", sa.String(64)),
    sa.Column("finalize_until_ms", _BIG),
    # How often validating or finalizing it was begun without its end, and when it is tried again:
    # what ends every store that touches it must not take the other batches with it each time.
    _count("tries"),
    _count("retry_ms"),
    # Engines that its lines ended, as far as no other line can have been it.
    _count("engine_deaths"),
    # Why its input could not be read, or its end files not be written, when it was last tried, for
    # those who wait for it.
    sa.Column("fault", sa.Text),
    # When the rows and blobs that only running it needed were dropped, after it had ended.
    sa.Column("cleared_ms", _BIG),
    # Not before that time, so that broken streams of its results can go on; 0 when there was none.
    _count("keep_until_ms"),
    sa.Column("traceparent", sa.String(64), nullable=False, server_default=""),
    *(
        sa.CheckConstraint(f"(status = '{state}') = ({state}_at IS NOT NULL)", name=f"{state}_at")
        for state in _END_STATES
    ),
    sa.CheckConstraint("(sealed_ms IS NULL) = (seal_outcome IS NULL)", name="seal"),
    sa.CheckConstraint(
        "status NOT IN ('finalizing', 'completed', 'expired', 'cancelled')"
        " OR sealed_ms IS NOT NULL",
        name="sealed",
    ),
    sa.CheckConstraint("lines_done <= lines_total AND lines_cut <= lines_total", name="lines"),
    sa.CheckConstraint("completed + failed <= lines_total", name="counts"),
    sa.Index(None, "project_id", "seq"),
    # The loops look only at what is open, however many batches have ended.
    _partial_index("ix_batches_open", ("status", "seq"), OPEN_WHERE),
    _partial_index("ix_batches_window", ("pool_id", "seq"), WINDOW_WHERE),
    _partial_index("ix_batches_expiry", ("expires_ms",), EXPIRY_WHERE),
    _partial_index("ix_batches_stopping", ("stopping_ms",), STOPPING_WHERE),
    _partial_index("ix_batches_finalize", ("sealed_ms",), FINALIZE_WHERE),
    _partial_index("ix_batches_clear", ("keep_until_ms",), SEALED_WHERE),
)

UNCUT_WHERE: Final = "cut < lines"

batch_models: Final = sa.Table(
    "batch_models",
    metadata,
    _batch(primary_key=True),
    sa.Column("model", sa.String(512), primary_key=True),
    _project(),
    sa.Column("pool_id", sa.String(64), nullable=False),
    # The batch's, to order by.
    sa.Column("seq", _BIG, nullable=False),
    # The model's id in the line index of the input.
    sa.Column("model_id", sa.Integer, nullable=False),
    _count("lines"),
    _count("cut"),
    # The first line of the model that is in no chunk.
    sa.Column("next_line", _BIG, nullable=False),
    sa.CheckConstraint("cut <= lines", name="cut"),
    _partial_index("ix_batch_models_uncut", ("pool_id", "seq"), UNCUT_WHERE),
)
"""Where each model of a batch of several is cut up to. There is none for a batch of one model."""

batch_engines: Final = sa.Table(
    "batch_engines",
    metadata,
    _batch(primary_key=True),
    sa.Column("pool_id", sa.String(64), primary_key=True),
    sa.Column("engine_revision", sa.String(64), primary_key=True),
    _project(),
    # When the first attempt of the batch was opened by an executor of this revision.
    sa.Column("first_ms", _BIG, nullable=False),
)
"""Which engine configurations ran lines of a batch; it stays when the batch has ended."""

chunks: Final = sa.Table(
    "chunks",
    metadata,
    _id(),
    _batch(),
    _project(),
    sa.Column("pool_id", sa.String(64), nullable=False),
    # Of its lines, in a batch of several; null means the batch's.
    sa.Column("model", sa.String(512)),
    sa.Column("batch_seq", _BIG, nullable=False),
    # Packed (first u32, count u32) pairs, ascending; the first line again, to order by.
    sa.Column("lines", sa.LargeBinary, nullable=False),
    sa.Column("first_line", _BIG, nullable=False),
    sa.Column("line_count", _BIG, nullable=False),
    sa.Column("input_bytes", _BIG, nullable=False),
    # queued: waits to be handed out alone; out: dispatched; done: nothing left to do.
    sa.Column("state", sa.String(8), nullable=False),
    sa.Column("alone", sa.Boolean, nullable=False),
    sa.Column("dispatch", sa.Integer, nullable=False),
    sa.Column("dispatched_ms", _BIG),
    # Null until an attempt was opened under the current dispatch.
    sa.Column("lease_until_ms", _BIG),
    _count("attempts"),
    # Deaths that its lines have seen, and those that its single line died alone in the engine.
    _count("deaths"),
    _count("deaths_alone"),
    sa.CheckConstraint("state IN ('queued', 'out', 'done')", name="state"),
    sa.Index(None, "batch_id"),
    _partial_index("ix_chunks_open", ("pool_id", "batch_seq", "first_line"), "state <> 'done'"),
)

attempts: Final = sa.Table(
    "attempts",
    metadata,
    sa.Column("token", sa.String(64), primary_key=True),
    sa.Column("chunk_id", sa.String(64), sa.ForeignKey("chunks.id"), nullable=False),
    _batch(),
    _project(),
    sa.Column("dispatch", sa.Integer, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("executor_id", sa.String(128), nullable=False),
    sa.Column("incarnation", sa.String(64), nullable=False),
    # The broker's count with which it was opened: a repeated call is told from a redelivery.
    sa.Column("num_delivered", _BIG, nullable=False),
    sa.Column("opened_ms", _BIG, nullable=False),
    sa.Column("lease_until_ms", _BIG, nullable=False),
    # Packed ranges of the last beat: lines that are in the engine, the suspects of its death.
    sa.Column("started", sa.LargeBinary, nullable=False),
    sa.Column("closed_ms", _BIG),
    sa.Column("outcome", sa.String(16)),
    sa.CheckConstraint("(closed_ms IS NULL) = (outcome IS NULL)", name="closed"),
    sa.Index(None, "chunk_id"),
    _partial_index("ix_attempts_open", ("executor_id", "batch_id"), "closed_ms IS NULL"),
    _partial_index("ix_attempts_open_of_batch", ("batch_id",), "closed_ms IS NULL"),
)

bit_blocks: Final = sa.Table(
    "bit_blocks",
    metadata,
    _batch(primary_key=True),
    sa.Column("block", sa.Integer, primary_key=True),
    _project(),
    # One bit a line, 4,096 lines: set means that a result is recorded.
    sa.Column("bits", sa.LargeBinary, nullable=False),
)

segments: Final = sa.Table(
    "segments",
    metadata,
    sa.Column("id", _BIG, primary_key=True, autoincrement=True),
    _batch(),
    _project(),
    # The batch's version by this commit: streams tell results in this order.
    sa.Column("version", _BIG, nullable=False),
    sa.Column("first_line", _BIG, nullable=False),
    sa.Column("last_line", _BIG, nullable=False),
    # RESULT_RECORDs of the lines that won, with offsets into payload or blob.
    sa.Column("records", sa.LargeBinary, nullable=False),
    # Exactly one of the two: small frames stay in their row.
    sa.Column("payload", sa.LargeBinary),
    sa.Column("blob", sa.String(200)),
    sa.CheckConstraint("(payload IS NULL) <> (blob IS NULL)", name="place"),
    sa.Index(None, "batch_id", "first_line"),
    sa.Index("ix_segments_version", "batch_id", "version", unique=True),
)

outbox: Final = sa.Table(
    "outbox",
    metadata,
    sa.Column("id", _BIG, primary_key=True, autoincrement=True),
    _project(),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
    sa.Column("created_ms", _BIG, nullable=False),
    sqlite_autoincrement=True,
)
"""What others must be told; the row id is the message id, so ids are never used twice."""
