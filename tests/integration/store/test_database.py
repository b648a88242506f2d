"""The writer: grouped commits in which every statement stands or falls alone."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from services.store.db import migrate
from services.store.db.database import Database
from services.store.tables.core import counters, metadata, outbox
from tests.kit.schemas import schema_of


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_url")
    database = Database(url)
    migrate.upgrade(database.writer_engine, 1)
    yield database
    database.close()


def add(connection: sa.Connection, subject: str) -> int:
    row = {"project_id": "default", "subject": subject, "payload": b"", "created_ms": 1}
    return connection.execute(outbox.insert().values(**row)).inserted_primary_key[0]


async def subjects(db: Database) -> list[str]:
    return await db.read(
        lambda connection: list(
            connection.scalars(sa.select(outbox.c.subject).order_by(outbox.c.id))
        )
    )


async def test_a_failing_statement_undoes_itself_alone(db: Database) -> None:
    def fail(connection: sa.Connection) -> None:
        add(connection, "undone")
        raise ValueError("mine")

    def collide(connection: sa.Connection) -> None:
        connection.execute(counters.insert().values(name="seq", n=1))

    outcomes = await asyncio.gather(
        db.write("test.step", lambda connection: add(connection, "a")),
        db.write("test.step", fail),
        db.write("test.step", collide),
        db.write("test.step", lambda connection: add(connection, "b")),
        return_exceptions=True,
    )

    assert isinstance(outcomes[1], ValueError)
    assert isinstance(outcomes[2], sa.exc.IntegrityError)
    assert await subjects(db) == ["a", "b"]


async def test_a_failing_statement_that_is_alone_is_undone_and_hurts_no_later_one(
    db: Database,
) -> None:
    def fail(connection: sa.Connection) -> None:
        add(connection, "undone")
        raise ValueError("mine")

    def collide(connection: sa.Connection) -> None:
        add(connection, "undone")
        connection.execute(counters.insert().values(name="seq", n=1))

    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            await db.write("test.step", fail)
        with pytest.raises(sa.exc.IntegrityError):
            await db.write("test.step", collide)
        await db.write("test.step", lambda connection: add(connection, "kept"))

    assert await subjects(db) == ["kept", "kept"]


async def test_read_then_write_loses_nothing(db: Database) -> None:
    def increment(connection: sa.Connection) -> None:
        n = connection.scalar(sa.select(counters.c.n).where(counters.c.name == "seq"))
        connection.execute(counters.update().values(n=n + 1))

    await asyncio.gather(*(db.write("test.step", increment) for _ in range(300)))

    assert await db.read(lambda connection: connection.scalar(sa.select(counters.c.n))) == 300


async def test_a_caller_that_goes_away_hurts_nobody(db: Database) -> None:
    writes = [
        asyncio.ensure_future(
            db.write("test.step", lambda connection, n=n: add(connection, str(n)))
        )
        for n in range(100)
    ]
    await asyncio.sleep(0)
    for write in writes[::2]:
        write.cancel()
    await asyncio.gather(*writes, return_exceptions=True)
    await db.write("test.step", lambda connection: add(connection, "last"))

    written = await subjects(db)
    assert written[-1] == "last"
    assert {str(n) for n in range(1, 100, 2)} <= set(written)


async def test_what_was_committed_survives_and_readers_see_it(db: Database) -> None:
    for number in range(3):
        await db.write("test.step", lambda connection, number=number: add(connection, str(number)))
        assert (await subjects(db))[-1] == str(number)


def test_the_migrations_make_the_schema_that_the_code_uses(db: Database) -> None:
    made = schema_of(db.writer_engine)
    with db.writer_engine.begin() as connection:
        metadata.drop_all(connection)
        connection.execute(sa.text("DROP TABLE alembic_version"))
        config = Config()
        config.set_main_option("script_location", str(migrate.MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    assert schema_of(db.writer_engine) == made
    with db.writer_engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    migrate.upgrade(db.writer_engine, 2)


def test_the_database_syncs_each_commit(db: Database) -> None:
    with db.writer_engine.connect() as connection:
        if db.file is not None:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        else:
            assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"


def test_nobody_waits_for_ever_for_a_store_that_stopped(db: Database) -> None:
    """What is held in a transaction is let go of by the server, before others give up."""
    with db.writer_engine.connect() as connection:
        if db.file is not None:
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 3_000
            return
        limits = [
            connection.exec_driver_sql(f"SHOW {name}").scalar()
            for name in ("idle_in_transaction_session_timeout", "lock_timeout", "statement_timeout")
        ]
        assert limits == ["5s", "8s", "30s"]


def test_the_last_migration_is_the_one_that_the_store_looks_for(db: Database) -> None:
    config = Config()
    config.set_main_option("script_location", str(migrate.MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_current_head() == migrate.HEAD
    with db.writer_engine.connect() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == migrate.HEAD
