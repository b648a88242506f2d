"""Tables in which stores keep account: of their own commits, and of what projects cost pools."""

from typing import Final

import sqlalchemy as sa

from services.store.tables.core import metadata

commit_marks: Final = sa.Table(
    "commit_marks",
    metadata,
    # By `Dialect.holder`; PostgreSQL's stores only.
    sa.Column("store", sa.String(64), primary_key=True),
    sa.Column("nonce", sa.String(32), nullable=False),
)
"""What each store's last commit wrote: none but that commit can have written it."""

pool_deaths: Final = sa.Table(
    "pool_deaths",
    metadata,
    sa.Column("project_id", sa.String(64), sa.ForeignKey("projects.id"), primary_key=True),
    sa.Column("pool_id", sa.String(64), primary_key=True),
    # As of `at_ms`: time takes them off again.
    sa.Column("deaths", sa.Float, nullable=False),
    sa.Column("at_ms", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
    # Nothing of the project is handed out in the pool before that.
    sa.Column("held_until_ms", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
)
"""Engine deaths that lines of a project are to blame for."""
