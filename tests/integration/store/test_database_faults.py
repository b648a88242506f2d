"""Faults of the database: work is done once, callers are told, and it goes on by itself."""

import asyncio
import contextlib
import functools
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
import sqlalchemy as sa

from services.kit.process.settings import SettingsError
from services.kit.wire.errors import InvalidRequestError, UnavailableError
from services.store.admin import idempotency_repo
from services.store.db import migrate, postgres, sqlite, writer
from services.store.db.database import Database
from services.store.db.dialect import Mark
from services.store.db.nul_text import stored, told
from services.store.files import files_repo
from services.store.tables.core import files, outbox, projects
from tests.kit.eventually import eventually
from tests.kit.postgres import Postgres
from tests.kit.tcp_proxy import TcpProxy

STEP = "test.step"


@pytest.fixture
def db(postgres_url: str) -> Iterator[Database]:
    database = Database(postgres_url)
    migrate.upgrade(database.writer_engine, 1)
    yield database
    database.close()


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setattr(sqlite, "BUSY_MS", 50)
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 0.3)
    database = Database(f"sqlite:///{tmp_path / 'test.db'}")
    migrate.upgrade(database.writer_engine, 1)
    yield database
    database.close()


def add(connection: sa.Connection, subject: str, payload: bytes = b"") -> None:
    row = {"project_id": "default", "subject": subject, "payload": payload, "created_ms": 1}
    connection.execute(outbox.insert().values(**row))


def subjects(connection: sa.Connection) -> list[str]:
    return list(connection.scalars(sa.select(outbox.c.subject).order_by(outbox.c.id)))


class Times:
    """Counts how often a statement ran, and does something in the first run."""

    def __init__(self, subject: str, first: Callable[[], object]) -> None:
        self.ran = 0
        self._subject = subject
        self._first = first

    def __call__(self, connection: sa.Connection) -> int:
        self.ran += 1
        add(connection, self._subject)
        if self.ran == 1:
            self._first()
        return self.ran


# --- PostgreSQL ------------------------------------------------------------------------------


async def test_a_transaction_whose_connection_is_ended_is_done_again(
    db: Database, postgres: Postgres, postgres_url: str
) -> None:
    def cut(connection: sa.Connection) -> None:
        if not cuts:
            cuts.append(postgres.cut(postgres_url))
        add(connection, "b")

    cuts: list[int] = []
    await asyncio.gather(
        db.write(STEP, lambda connection: add(connection, "a")),
        db.write(STEP, cut),
        db.write(STEP, lambda connection: add(connection, "c")),
    )

    assert cuts
    assert sorted(await db.read(subjects)) == ["a", "b", "c"]


async def test_a_commit_that_never_arrived_is_done_again(
    db: Database, postgres: Postgres, postgres_url: str
) -> None:
    # The last thing before the commit: the server undoes it, and the client cannot know.
    statement = Times("once", lambda: postgres.cut(postgres_url))

    assert await db.write(STEP, statement) == 2
    assert await db.read(subjects) == ["once"]


async def test_a_commit_whose_answer_was_lost_is_not_done_again(
    postgres: Postgres, postgres_url: str
) -> None:
    async with TcpProxy(postgres.port) as proxy:
        through = postgres.url(postgres_url.rpartition("/")[2], port=proxy.port)
        db = Database(through)
        await asyncio.to_thread(migrate.upgrade, db.writer_engine, 1)
        direct = psycopg.connect(postgres_url, autocommit=True)

        def committed() -> bool:
            return bool(direct.execute("SELECT 1 FROM outbox").fetchall())

        try:
            sent = proxy.sent
            statement = Times("once", lambda: setattr(proxy, "lose_answers", True))
            write = asyncio.create_task(db.write(STEP, statement))
            await eventually(committed)
            assert proxy.sent > sent
            proxy.lose_answers = False
            proxy.cut()

            assert await write == 1
            assert await db.read(subjects) == ["once"]
        finally:
            direct.close()
            await asyncio.to_thread(db.close)


async def test_a_commit_of_which_nobody_knows_any_more_is_told_as_such(
    db: Database, postgres: Postgres, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As of a server that took over without the transaction: one far in its future.
    marked = db._dialect.mark
    monkeypatch.setattr(
        db._dialect,
        "mark",
        lambda connection: replace(cast(Mark, marked(connection)), transaction=str(2**40)),
    )
    statement = Times("perhaps", lambda: postgres.cut(postgres_url))

    with pytest.raises(UnavailableError, match="not known"):
        await db.write(STEP, statement)
    assert statement.ran == 1
    await db.write(STEP, lambda connection: add(connection, "next"))


@pytest.mark.parametrize("how", ["promoted", "restored"])
async def test_a_server_that_took_over_does_not_pass_another_commit_for_a_lost_one(
    how: str,
) -> None:
    """Its next transaction has the number of the one that was lost."""
    primary = Postgres()
    standby = None
    try:
        await asyncio.to_thread(primary.start)
        url = await asyncio.to_thread(primary.new_database)
        with closing(psycopg.connect(url, autocommit=True)) as operator:
            async with TcpProxy(primary.port) as first, TcpProxy(primary.port) as second:
                name = url.rpartition("/")[2]
                one = Database(primary.url(name, port=first.port))
                other = Database(primary.url(name, port=second.port))
                await asyncio.to_thread(migrate.upgrade, one.writer_engine, 1)
                await one.write(STEP, lambda connection: add(connection, "one 0"))
                await other.write(STEP, lambda connection: add(connection, "other 0"))
                standby = await asyncio.to_thread(primary.standby)
                lost = asyncio.create_task(
                    one.write(STEP, lambda connection: add(connection, "one 1"))
                )
                number = await eventually(lambda: waiting_for_standby(operator))
                primary.stop(signal.SIGQUIT)
                await asyncio.to_thread(standby.take_over, as_copy=how == "restored")
                second.retarget(standby.port)
                await other.write(STEP, lambda connection: add(connection, "other 1"))
                assert standby.sql(f"SELECT pg_xact_status('{number}'::xid8)") == [("committed",)]
                first.retarget(standby.port)
                with pytest.raises(UnavailableError, match="not known"):
                    await lost
                await one.write(STEP, lambda connection: add(connection, "one 2"))
                assert await one.read(subjects) == ["one 0", "other 0", "other 1", "one 2"]
                for each in (one, other):
                    await asyncio.to_thread(each.close)
    finally:
        primary.remove()
        if standby is not None:
            standby.remove()


async def test_a_commit_that_was_looked_up_has_reached_the_standby() -> None:
    """One whose connection is ended while it waits for that stays on the primary alone."""
    primary = Postgres()
    standby = None
    try:
        await asyncio.to_thread(primary.start)
        url = await asyncio.to_thread(primary.new_database)
        with (
            closing(psycopg.connect(url, autocommit=True)) as operator,
            closing(Database(url)) as db,
        ):
            await asyncio.to_thread(migrate.upgrade, db.writer_engine, 1)
            standby = await asyncio.to_thread(primary.standby)
            write = asyncio.create_task(db.write(STEP, lambda found: add(found, "once")))
            number = await eventually(lambda: waiting_for_standby(operator))
            await asyncio.to_thread(primary.cut, url)
            with closing(psycopg.connect(url, autocommit=True)) as again:
                await eventually(lambda: waiting_for_standby(again) not in {"", number})
                assert await db.read(subjects) == ["once"]
                assert not write.done()
                standby.follow(primary)
                await write
            with closing(psycopg.connect(standby.url(url.rpartition("/")[2]))) as other:
                assert other.execute("SELECT subject FROM outbox").fetchall() == [("once",)]
    finally:
        if standby is not None:
            standby.remove()
        primary.remove()


def waiting_for_standby(operator: "psycopg.Connection[Any]") -> str:
    """Return the number of the transaction whose commit waits for the standby; else nothing."""
    rows = operator.execute(
        "SELECT backend_xid::text FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    ).fetchall()
    return str(rows[0][0]) if rows else ""


async def test_readers_whose_connections_were_ended_make_new_ones(
    db: Database, postgres: Postgres, postgres_url: str
) -> None:
    await asyncio.gather(*(db.read(subjects) for _ in range(8)))
    assert await asyncio.to_thread(postgres.cut, postgres_url)

    assert await asyncio.gather(*(db.read(subjects) for _ in range(8))) == [[]] * 8


async def test_a_database_that_is_away_is_told_and_work_goes_on_when_it_is_back(
    db: Database, postgres: Postgres
) -> None:
    await asyncio.to_thread(db.look)
    before = db.time.heard_since_ms
    await asyncio.to_thread(postgres.stop, signal.SIGQUIT)
    try:
        for call in (db.read(subjects), db.write(STEP, lambda connection: add(connection, "a"))):
            with pytest.raises(UnavailableError) as error:
                await call
            assert error.value.retry_after_seconds
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(db.look)
        # Whoever comes next is told at once.
        async with asyncio.timeout(2):
            with pytest.raises(UnavailableError):
                await db.write(STEP, lambda connection: add(connection, "b"))
    finally:
        await asyncio.to_thread(postgres.start)

    await db.write(STEP, lambda connection: add(connection, "c"))
    await asyncio.to_thread(db.look)
    assert (await db.read(subjects))[-1] == "c"
    assert db.time.heard_since_ms > before


async def test_a_reader_cannot_write(db: Database) -> None:
    with pytest.raises(UnavailableError):
        await db.read(lambda connection: add(connection, "a"))


async def test_what_is_too_long_is_the_callers_fault(db: Database) -> None:
    long = {"id": "x" * 65, "created_at": 1}
    outcomes = await asyncio.gather(
        db.write(STEP, lambda connection: connection.execute(projects.insert(), [long])),
        db.write(STEP, lambda connection: add(connection, "a")),
        return_exceptions=True,
    )
    assert isinstance(outcomes[0], InvalidRequestError)
    assert await db.read(subjects) == ["a"]


def test_two_stores_that_start_at_once_make_one_schema(postgres_url: str) -> None:
    stores = [Database(postgres_url) for _ in range(2)]

    async def both() -> None:
        await asyncio.gather(
            *(asyncio.to_thread(migrate.upgrade, each.writer_engine, 1) for each in stores)
        )

    try:
        asyncio.run(both())
    finally:
        for each in stores:
            each.close()


def is_dead(store: Database, *, seen_by: Database) -> bool:
    """Whether one store takes another for dead."""
    holder = sa.literal(store.holder)
    return bool(
        seen_by.run(lambda found: found.scalar(sa.select(seen_by.others_dead(found, holder))))
    )


async def test_a_store_that_lives_is_known_to_others_until_it_ends(postgres_url: str) -> None:
    first, second = Database(postgres_url), Database(postgres_url)
    try:
        migrate.upgrade(first.writer_engine, 1)
        dead = functools.partial(is_dead, first, seen_by=second)
        assert dead(), "it has shown no sign of life yet"
        first.look()
        second.look()
        assert not dead()
        first.close()
        # The server sees a moment later that it is gone.
        await eventually(dead)
    finally:
        second.close()


async def test_a_store_whose_old_connection_the_server_still_holds_is_known_later(
    postgres_url: str,
) -> None:
    """As after a network that was cut: the server may take the old one for open for a while."""
    first, second = Database(postgres_url), Database(postgres_url)
    try:
        migrate.upgrade(first.writer_engine, 1)
        dead = functools.partial(is_dead, first, seen_by=second)
        with psycopg.connect(postgres_url, autocommit=True) as old:
            old.execute("SELECT pg_advisory_lock(%s, %s)", (postgres._PRESENCE, int(first.holder)))
            first.look()
            assert not dead()
        await eventually(dead)
        first.look()
        assert not dead()
    finally:
        first.close()
        second.close()


# --- text ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "a\x00b", "\x00\x00", "\ue000", "\ue000\x00\ue001", "\ue000\ue000\x00", "ä\ue001"]
)
def test_any_text_comes_back_as_it_was(text: str) -> None:
    assert "\x00" not in stored(text)
    assert told(stored(text)) == text


@pytest.mark.parametrize("kind", ["db", "local"])
async def test_nul_characters_are_kept_and_looked_for(
    kind: str, request: pytest.FixtureRequest
) -> None:
    db: Database = request.getfixturevalue(kind)
    names: dict[str, Any] = {"filename": "a\x00b.jsonl", "id": "file-\x00"}
    file = files_repo.NewFile(
        project_id="default",
        purpose="batch",
        bytes=0,
        created_at=1,
        expires_at=None,
        parts=[],
        **names,
    )
    keyed = idempotency_repo.keyed("default", "key\x00", "file")

    for _ in range(2):
        row = await db.write(
            STEP,
            lambda connection: idempotency_repo.once(
                connection,
                keyed,
                1,
                make=lambda: files_repo.insert(connection, file),
                find=lambda file_id: files_repo.get(connection, file_id, "default", 1),
            ),
        )
        assert (row.id, row.filename) == (file.id, file.filename)
    assert await db.read(lambda connection: connection.scalar(sa.select(files.c.id))) == file.id


# --- SQLite ----------------------------------------------------------------------------------


async def test_a_file_that_another_process_has_locked(local: Database, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "test.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(UnavailableError) as error:
        await local.write(STEP, lambda connection: add(connection, "a"))
    assert error.value.retry_after_seconds
    assert await local.read(subjects) == []
    other.execute("COMMIT")
    other.close()

    await local.write(STEP, lambda connection: add(connection, "b"))
    assert await local.read(subjects) == ["b"]


async def test_a_file_without_room_to_grow(local: Database) -> None:
    pages = local.run(lambda found: found.exec_driver_sql("PRAGMA page_count").scalar_one())
    local.run(lambda found: found.exec_driver_sql(f"PRAGMA max_page_count = {pages}").close())
    with pytest.raises(UnavailableError, match="no room") as error:
        await local.write(STEP, lambda connection: add(connection, "a", b"x" * 1_000_000))
    assert error.value.retry_after_seconds
    local.run(lambda found: found.exec_driver_sql("PRAGMA max_page_count = 100000").close())

    await local.write(STEP, lambda connection: add(connection, "b", b"x" * 1_000_000))
    assert await local.read(subjects) == ["b"]


# --- what is asked of a server ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "durable", "found"),
    [
        ("off", True, "on"),
        ("remote_write", True, "remote_write"),
        ("on", False, "on"),
        ("off", False, "off"),
    ],
)
def test_commits_are_synced_whatever_a_server_says(
    postgres_url: str, said: str, durable: bool, found: str
) -> None:
    """No less than was promised, and no less than the operator asked for."""
    url = f"{postgres_url}?options=-c%20synchronous_commit%3D{said}"
    with contextlib.closing(Database(url, durable=durable)) as database:
        setting = database.run(lambda each: each.scalar(sa.text("SHOW synchronous_commit")))
    assert setting == found


# --- addresses -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_each_name_of_postgresql_is_understood(scheme: str) -> None:
    db = Database(f"{scheme}://user@host/name")
    assert db._writer_engine.dialect.driver == "psycopg"
    db.close()


@pytest.mark.parametrize(
    "url",
    [
        "mysql://user:word@host/name",
        "//user:word@host",
        "word",
        "postgresql://user:word@host:port/name",
    ],
)
def test_another_database_is_refused_without_telling_the_password(url: str) -> None:
    with pytest.raises(SettingsError) as error:
        Database(url)
    assert "word" not in str(error.value)
