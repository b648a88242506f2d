"""Brings the schema to this version; Alembic's own programming interface."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

if TYPE_CHECKING:
    from alembic.config import Config

from services.kit import failpoints
from services.kit.ids import DEFAULT_PROJECT
from services.kit.settings import SettingsError
from services.store.models import counters, projects

HEAD: Final = "0002"
"""The last migration; a test compares it with the folder."""

MIGRATIONS: Final = Path(__file__).parent / "migrations"


def upgrade(engine: sa.Engine, now_at: int) -> None:
    """Run what migrations are missing, and make the rows that always exist.

    All of it is one transaction: whoever is killed in it leaves the schema that was there.

    Raises:
        SettingsError: the schema is of a newer version; nothing is changed.
    """
    with engine.begin() as connection:
        if revision(connection) != HEAD:
            _run_missing(connection)
        if connection.scalar(sa.select(counters.c.n).where(counters.c.name == "seq")) is None:
            connection.execute(counters.insert().values(name="seq", n=0))
        default = sa.select(projects.c.id).where(projects.c.id == DEFAULT_PROJECT)
        if connection.scalar(default) is None:
            connection.execute(projects.insert().values(id=DEFAULT_PROJECT, created_at=now_at))
        failpoints.before("schema.migrate")
    failpoints.after("schema.migrate")


def revision(connection: sa.Connection) -> str | None:
    """Return the schema's revision; None for an empty database."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(sa.text("SELECT version_num FROM alembic_version"))
    return found


def known_revisions() -> set[str]:
    """Return all revisions that this version knows."""
    from alembic.script import ScriptDirectory

    return {each.revision for each in ScriptDirectory.from_config(_config()).walk_revisions()}


def _run_missing(connection: sa.Connection) -> None:
    # Imported late: it takes 12 MiB and 150 ms that a store on a current schema needs not.
    from alembic import command

    current = revision(connection)
    if current is not None and current not in known_revisions():
        raise SettingsError(
            f"the database is of a newer version of Nightshift (schema {current}; this version "
            f"knows up to {HEAD}) and was left as it is: start the newer version, or put a backup "
            "back that was taken before the upgrade"
        )

    config = _config()
    config.attributes["connection"] = connection

    if connection.dialect.name == "postgresql":
        # However much stands there already, others wait.
        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")

    def between(*_: object) -> None:
        failpoints.before("schema.statement")

    sa.event.listen(connection, "before_cursor_execute", between)
    try:
        command.upgrade(config, "head")
    finally:
        sa.event.remove(connection, "before_cursor_execute", between)


def _config() -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return config
