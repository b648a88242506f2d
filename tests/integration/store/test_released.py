"""Data of every released schema, migrated to this one: all is well, and its batches go on."""

import asyncio
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory

from protos.nightshift.v1 import batches_pb2, work_pb2
from services.store.backup.target import Facts, Place, sha256
from services.store.checkup import doctor
from services.store.db import migrate
from services.store.db.database import Database
from services.store.settings import StoreSettings
from tests.integration.store_work import harness
from tests.integration.store_work.harness import Store, running
from tests.kit import backups
from tests.kit.postgres import Postgres
from tests.kit.released.load import SCHEMAS, Batch, make_schema, released
from tests.kit.schemas import schema_of
from tests.kit.store import StoreProcess, client_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

_ENDS = {
    "completed": batches_pb2.BATCH_STATUS_COMPLETED,
    "failed": batches_pb2.BATCH_STATUS_FAILED,
    "expired": batches_pb2.BATCH_STATUS_EXPIRED,
    "cancelled": batches_pb2.BATCH_STATUS_CANCELLED,
}
NewDatabase = Callable[[], str]


@pytest.fixture(params=["sqlite", "postgresql"])
def new_database(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Return the address of an empty database, of either kind, for a store in `tmp_path`."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'nightshift.db'}"
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    url = postgres.new_database()
    monkeypatch.setattr(harness.databases, "make", lambda: url)
    yield url


def faults(data: Path, url: str) -> list[dict[str, object]]:
    """Check everything that stands there."""
    said: list[dict[str, object]] = []
    settings = StoreSettings(data_dir=data, database_url=url)
    doctor.check(settings, said.append, deep=True)
    return [each for each in said if each["event"] == "fault" and each["kind"] != "secret"]


def test_there_is_data_of_every_schema_but_the_one_that_is_worked_on() -> None:
    config = Config()
    config.set_main_option("script_location", str(migrate.MIGRATIONS))
    known = {each.revision for each in ScriptDirectory.from_config(config).walk_revisions()}
    missing = known - {migrate.HEAD} - set(SCHEMAS)
    assert not missing, "make it with the code of that schema: python -m tests.kit.released.make"


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_released_migration_is_as_it_was(schema: str, tmp_path: Path) -> None:
    migrated, made = (
        sa.create_engine(f"sqlite:///{tmp_path / name}") for name in ("migrated.db", "made.db")
    )
    with migrated.begin() as connection:
        make_schema(connection, schema)
    with closing(sqlite3.connect(tmp_path / "made.db")) as file:
        # Tables before their indexes.
        statements = sorted(released(schema).made.values(), key=lambda sql: "INDEX" in sql[:20])
        file.executescript(";".join(statements))
    assert schema_of(migrated) == schema_of(made)
    for engine in (migrated, made):
        engine.dispose()


@pytest.mark.parametrize("schema", SCHEMAS)
def test_no_value_is_lost_on_the_way(schema: str, new_database: str, tmp_path: Path) -> None:
    """A migration that changes one on purpose says so here."""
    released(schema).load(new_database, tmp_path)
    database = Database(new_database)
    try:
        before = database.run(_values)
        migrate.upgrade(database.writer_engine, 1)
        after = database.run(_values)
    finally:
        database.close()
    del before["alembic_version"]
    for table, rows in before.items():
        columns = rows[0].keys() if rows else ()
        kept = [{name: row[name] for name in columns} for row in after[table]]
        assert kept == rows, table


def _values(connection: sa.Connection) -> dict[str, list[dict[str, Any]]]:
    """Return all rows of all tables, in the order of their keys."""
    found = sa.MetaData()
    found.reflect(connection)
    return {
        table.name: [
            dict(row)
            for row in connection.execute(
                sa.select(table).order_by(*table.primary_key.columns)
            ).mappings()
        ]
        for table in found.sorted_tables
    }


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_batches_of_a_released_schema_go_on(
    schema: str, new_database: str, tmp_path: Path
) -> None:
    data = released(schema)
    await asyncio.to_thread(data.load, new_database, tmp_path)
    async with running(tmp_path, mixed_models=True) as store:
        assert await asyncio.to_thread(faults, tmp_path, new_database) == []
        # The executors of before are gone; their leases run out.
        store.clock.advance(20)
        await _finish(store, data.batches)
        for batch in data.batches:
            await _check_end(store, batch)
        assert await asyncio.to_thread(faults, tmp_path, new_database) == []


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_a_backup_of_a_released_schema_is_put_back(schema: str, tmp_path: Path) -> None:
    data = released(schema)
    place = Place(tmp_path / "backup")
    with place.being_made():
        await asyncio.to_thread(data.load, f"sqlite:///{place.database}", place.root)
        place.finish(
            Facts(
                format=1,
                schema=schema,
                version="0",
                taken_at=0,
                rows=0,
                blobs=len(data.blobs),
                bytes=0,
                database_sha256=sha256(place.database),
            )
        )
    await backups.put_back_here(place.root, tmp_path / "place")
    async with running(tmp_path / "place", mixed_models=True) as store:
        # Nothing has to run out: who had it is known to be gone.
        await _finish(store, data.batches)
        for batch in data.batches:
            await _check_end(store, batch)


async def _finish(store: Store, batches: list[Batch]) -> None:
    """Hand out and run whatever can be, until every batch has ended."""
    for _ in range(12):
        await store.turn()
        window = (await store.window()).batches if (await store.lead()).leader else []
        cuts = [
            work_pb2.Cut(
                batch_id=each.batch_id,
                pool_id=each.pool_id,
                max_lines=3,
                max_bytes=1 << 30,
            )
            for each in window
        ]
        cut = await store.work.CutChunks(
            work_pb2.CutChunksRequest(term=store.term, cuts=cuts), metadata=store.metadata
        )
        for dispatch in (*cut.dispatches, *await store.reclaim()):
            opened = await store.open(dispatch)
            lines = [n for each in opened.lines for n in range(each.first, each.first + each.count)]
            assert await store.finish(opened.token, lines, dispatch.batch_id) == len(lines)
        # A chunk that was cut for another executor runs out, too.
        store.clock.advance(3)
        states = [(await store.get(batch.id)).status for batch in batches]
        if states == [_ENDS[batch.ends] for batch in batches]:
            return
    raise AssertionError(f"not ended: {states}")


async def _check_end(store: Store, batch: Batch) -> None:
    """Each line stands once in one of the two files."""
    output, error = await store.end_files(batch.id)
    ids = [line["custom_id"] for line in (*output, *error)]
    assert len(ids) == len(set(ids)) == batch.lines
    if batch.lines > 1:
        assert sorted(ids) == sorted(f"r{number}" for number in range(batch.lines))


@pytest.mark.timeout(180)
async def test_a_migration_that_is_killed_midway_begins_anew(
    new_database: str, tmp_path: Path
) -> None:
    released("0001").load(new_database, tmp_path)
    environment = {
        "NIGHTSHIFT_STORE_DATABASE_URL": new_database,
        "NIGHTSHIFT_NATS_URL": "nats://127.0.0.1:1",
    }
    for place in (
        "schema.statement:before@9",
        "schema.migrate:before",
    ):
        killed = StoreProcess(tmp_path, {**environment, "NIGHTSHIFT_FAILPOINTS": f"{place}=kill"})
        killed.start()
        assert killed.process is not None
        assert await asyncio.to_thread(killed.process.wait, 60) == -signal.SIGKILL, killed.log()
        assert await asyncio.to_thread(_revision, new_database) == "0001"
    store = StoreProcess(tmp_path, environment)
    store.start()
    try:
        async with client_of(store):
            assert await asyncio.to_thread(_revision, new_database) == migrate.HEAD
    finally:
        store.stop()
    assert await asyncio.to_thread(faults, tmp_path, new_database) == []


def _revision(url: str) -> str | None:
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    try:
        with engine.connect() as connection:
            return migrate.revision(connection)
    finally:
        engine.dispose()


def test_an_older_store_refuses_a_newer_schema(new_database: str, tmp_path: Path) -> None:
    database = Database(new_database)
    migrate.upgrade(database.writer_engine, 1)
    database.run(lambda each: each.execute(sa.text("UPDATE alembic_version SET version_num = '9'")))
    database.close()
    store = StoreProcess(tmp_path, {"NIGHTSHIFT_STORE_DATABASE_URL": new_database})
    store.start()
    assert store.process is not None
    # The status at which `up` does not start it again.
    assert store.process.wait(60) == 2
    assert "is of a newer version of Nightshift (schema 9" in store.log()
    assert "start the newer version" in store.log()
