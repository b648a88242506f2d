"""Brings the schema to this version; Alembic's own programming interface."""

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from services.kit.ids import DEFAULT_PROJECT
from services.store.models import counters, projects


def upgrade(engine: sa.Engine, now_at: int) -> None:
    """Run what migrations are missing, and make the rows that always exist."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        if connection.scalar(sa.select(counters.c.n).where(counters.c.name == "seq")) is None:
            connection.execute(counters.insert().values(name="seq", n=0))
        default = sa.select(projects.c.id).where(projects.c.id == DEFAULT_PROJECT)
        if connection.scalar(default) is None:
            connection.execute(projects.insert().values(id=DEFAULT_PROJECT, created_at=now_at))
