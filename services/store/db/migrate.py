"""Brings the schema to this version: from any older one by Alembic, from nothing at once."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

if TYPE_CHECKING:
    from alembic.config import Config

from services.kit.process import failpoints
from services.kit.process.settings import SettingsError
from services.kit.wire.ids import DEFAULT_PROJECT
from services.store.tables.core import counters, metadata, projects

HEAD: Final = "0003"
"""The last migration; a test compares it with the folder."""

MIGRATIONS: Final = Path(__file__).parents[1] / "migrations"

_VERSIONS: Final = sa.Table(
    # As Alembic makes it.
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def upgrade(engine: sa.Engine, now_at: int) -> None:
    """Run what migrations are missing, and make the rows that always exist.

    All of it is one transaction: whoever is killed in it leaves the schema that was there.

    Raises:
        SettingsError: the schema is of a newer version; nothing is changed.
    """
    with engine.begin() as connection:
        found = revision(connection)
        if found is None:
            _make(connection)
        elif found != HEAD:
            _run_missing(connection, found)
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


def _make(connection: sa.Connection) -> None:
    """Make the whole schema in an empty database.

    What the migrations lead to, as a test holds against them, without Alembic: it takes 9 MiB of
    the store that starts, for as long as that lives, and 150 ms.
    """
    with _told(connection):
        # Unchecked: where a table stands without a revision, it is nobody's guess what is there.
        metadata.create_all(connection, checkfirst=False)
        _VERSIONS.create(connection, checkfirst=True)
        connection.execute(_VERSIONS.insert().values(version_num=HEAD))


def _run_missing(connection: sa.Connection, current: str) -> None:
    # Imported late: a store on a current schema needs none of it.
    from alembic import command

    if current not in known_revisions():
        raise SettingsError(
            f"the database is of a newer version of Nightshift (schema {current}; this version "
            f"knows up to {HEAD}) and was left as it is: start the newer version, or put a backup "
            "back that was taken before the upgrade"
        )

    config = _config()
    config.attributes["connection"] = connection
    with _told(connection):
        command.upgrade(config, "head")


@contextlib.contextmanager
def _told(connection: sa.Connection) -> Iterator[None]:
    """Have each statement of the block pass its failpoint, however long it takes."""
    if connection.dialect.name == "postgresql":
        # However much stands there already, others wait.
        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")

    def between(*_: object) -> None:
        failpoints.before("schema.statement")

    sa.event.listen(connection, "before_cursor_execute", between)
    try:
        yield
    finally:
        sa.event.remove(connection, "before_cursor_execute", between)


def _config() -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return config
