"""Fair shares: what one project, line or receiver holds is bounded."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_INDEXES = (
    (
        "ix_files_deleted",
        "files",
        ["deleted_at"],
        "deleted_at IS NOT NULL AND purged_at IS NULL",
    ),
    (
        "ix_files_expiring",
        "files",
        ["expires_at"],
        "expires_at IS NOT NULL AND purged_at IS NULL",
    ),
    (
        "ix_deliveries_pending_of_endpoint",
        "deliveries",
        ["endpoint_id", "next_ms"],
        "state = 'pending'",
    ),
    (
        "ix_webhook_endpoints_live",
        "webhook_endpoints",
        ["id", "project_id"],
        "deleted_at IS NULL",
    ),
)


def upgrade() -> None:
    """Bring the schema to this revision."""
    op.drop_index("ix_files_expires_at", table_name="files")
    for name, table, columns, where in _INDEXES:
        op.create_index(
            name,
            table,
            columns,
            sqlite_where=sa.text(where),
            postgresql_where=sa.text(where),
        )
    op.create_table(
        "pool_deaths",
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("pool_id", sa.String(length=64), nullable=False),
        sa.Column("deaths", sa.Float(), nullable=False),
        sa.Column("at_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column(
            "held_until_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_pool_deaths_project_id")
        ),
        sa.PrimaryKeyConstraint("project_id", "pool_id", name=op.f("pk_pool_deaths")),
    )
    with op.batch_alter_table("batches", schema=None) as batch_op:
        batch_op.add_column(
            sa.Column(
                "engine_deaths",
                sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
                nullable=False,
                server_default="0",
            )
        )
    op.create_table(
        "commit_marks",
        sa.Column("store", sa.String(length=64), nullable=False),
        sa.Column("nonce", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("store", name=op.f("pk_commit_marks")),
    )


def downgrade() -> None:
    """Go back to the revision before."""
    for name, table, _, _ in _INDEXES:
        op.drop_index(name, table_name=table)
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    with op.batch_alter_table("batches", schema=None) as batch_op:
        batch_op.drop_column("engine_deaths")
    op.drop_table("pool_deaths")
    op.drop_table("commit_marks")
