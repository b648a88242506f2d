"""Fair shares: what one project, line or receiver holds is bounded."""

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema to this revision."""


def downgrade() -> None:
    """Go back to the revision before."""
