"""Brings the schema to this version; Alembic's own programming interface."""

from pathlib import Path
from typing import Final

import sqlalchemy as sa

from services.kit import failpoints
from services.kit.ids import DEFAULT_PROJECT
from services.store.models import counters, projects

HEAD: Final = "0002"
"""The last migration; a test compares it with the folder."""

MIGRATIONS: Final = Path(__file__).parent / "migrations"


def upgrade(engine: sa.Engine, now_at: int) -> None:
    """Run what migrations are missing, and make the rows that always exist."""
    with engine.begin() as connection:
        if _revision(connection) != HEAD:
            _run_missing(connection)
        if connection.scalar(sa.select(counters.c.n).where(counters.c.name == "seq")) is None:
            connection.execute(counters.insert().values(name="seq", n=0))
        default = sa.select(projects.c.id).where(projects.c.id == DEFAULT_PROJECT)
        if connection.scalar(default) is None:
            connection.execute(projects.insert().values(id=DEFAULT_PROJECT, created_at=now_at))
        failpoints.before("schema.migrate")
    failpoints.after("schema.migrate")


def _revision(connection: sa.Connection) -> str | None:
    """Return the schema's revision; None for an empty database."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(sa.text("SELECT version_num FROM alembic_version"))
    return revision


def _run_missing(connection: sa.Connection) -> None:
    # Imported late: it takes 12 MiB and 150 ms that a store on a current schema needs not.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
