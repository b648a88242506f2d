"""Backups between the embedded parts and the production ones, and the check of the latter."""

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from services.store.blobs import holds_repo
from services.store.checkup import doctor
from services.store.db import migrate
from services.store.db.database import Database
from services.store.settings import StoreSettings
from services.store.snapshot import scratch, take_snapshot
from services.store.tables.core import sweep_holds
from tests.integration.store_work.harness import running
from tests.kit import backups
from tests.kit.data_at_rest import OPEN_LINES, Data, check, make
from tests.kit.postgres import Postgres
from tests.kit.s3_server import S3Server, s3_server

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Run a server for this module."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Make a data directory: a batch half done, one that ended, an upload begun."""
    return asyncio.run(make(tmp_path_factory.mktemp("embedded") / "data"))


@pytest.fixture(scope="module")
def first(embedded: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Take a backup of it."""
    to = tmp_path_factory.mktemp("first") / "backup"
    asyncio.run(backups.take_here(embedded.root, to))
    return to


@pytest.fixture
def production(postgres: Postgres, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Name an empty database and an empty bucket, as settings; this process has them too."""
    s3.empty()
    settings = {**s3.environment(), "NIGHTSHIFT_STORE_DATABASE_URL": postgres.new_database()}
    for name, value in settings.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    return settings


async def test_rows_are_those_of_one_moment(postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.new_database()
    with contextlib.closing(Database(url)) as db, contextlib.closing(Database(url)) as other:
        migrate.upgrade(db.writer_engine, 1)
        looks: list[int] = []

        def told(done: int) -> None:
            if not looks:
                # Some tables are copied, and this one comes later.
                other.run(lambda each: holds_repo.hold(each, "meanwhile", 1))
            looks.append(done)

        await take_snapshot.take(db, url, tmp_path / "rows.db", told)
        held = sa.select(sa.func.count()).select_from(sweep_holds)
        assert len(looks) > 1
        assert db.run(lambda each: each.scalar(held)) == 1
    with take_snapshot.opened(tmp_path / "rows.db") as copy:
        assert copy.scalar(held) == 0


def settings_of(place: Mapping[str, str], data: Path) -> StoreSettings:
    """Return the store's settings for that place."""
    return StoreSettings(
        data_dir=data,
        database_url=place["NIGHTSHIFT_STORE_DATABASE_URL"],
        blobs_url=place["NIGHTSHIFT_STORE_BLOBS_URL"],
    )


def faults(settings: StoreSettings) -> list[dict[str, Any]]:
    """Check everything there, deep; in a thread of its own where a loop runs."""
    said: list[dict[str, Any]] = []
    doctor.check(settings, said.append, deep=True)
    return [each for each in said if each["event"] == "fault"]


@pytest.mark.timeout(240)
def test_a_directory_goes_to_production_parts_and_back(
    embedded: Data,
    first: Path,
    production: dict[str, str],
    s3: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where rows are copied for the moment, and nothing may stay.
    copies = tmp_path / "tmp"
    copies.mkdir()
    monkeypatch.setenv("TMPDIR", str(copies))
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    for place in ("restore.blob:after@3", "restore.finish:before"):
        killed = backups.put_back(first, production, failpoint=f"{place}=kill")
        assert killed.status == -signal.SIGKILL, killed
        # Rows come last, and all at once.
        url = production["NIGHTSHIFT_STORE_DATABASE_URL"]
        assert backups.all_rows(url)["batches"] == []
        # Only its own: that of the one before is gone.
        assert len(list(copies.iterdir())) == 1
    refused = backups.take(tmp_path / "nothing", tmp_path / "nowhere")
    assert "there is no" in refused.why
    assert list(copies.iterdir()) == []
    with scratch.folder() as held:
        # Another command does not take what is still in use as left.
        ended = backups.put_back(first, production)
        assert list(copies.iterdir()) == [held]
    assert len(s3.objects()) > 0
    assert ended.status == 0, ended
    again = backups.put_back(first, production)
    assert "the database holds rows already" in again.why
    settings = settings_of(production, tmp_path / "nothing")
    assert faults(settings) == []
    assert len(s3.objects()) == ended.said["blobs"]

    ended = backups.take(production, tmp_path / "second")
    assert ended.status == 0, ended
    asyncio.run(backups.put_back_here(tmp_path / "second", tmp_path / "place"))
    before, after = (
        backups.all_rows(f"sqlite:///{folder / 'nightshift.db'}")
        for folder in (first, tmp_path / "place")
    )
    # All else is what each copy forgets on purpose.
    changed = {name for name, rows in before.items() if rows != after[name]}
    assert changed <= {"batches", "chunks", "leadership"}
    asyncio.run(_finish(Data(tmp_path / "place", embedded.open_batch, "", "")))
    assert check(tmp_path / "place", deep=True).faults == []


async def _finish(data: Data) -> None:
    async with running(data.root) as store:
        (data.root / "secret").chmod(0o600)
        await store.cut((data.open_batch, OPEN_LINES))
        store.clock.advance(20)
        for dispatch in await store.reclaim():
            opened = await store.open(dispatch)
            lines = [n for each in opened.lines for n in range(each.first, each.first + each.count)]
            await store.finish(opened.token, lines, data.open_batch)
        await store.turn()
        output, error = await store.end_files(data.open_batch)
        assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(OPEN_LINES)]
        assert error == []


@pytest.mark.timeout(120)
def test_what_is_damaged_there_is_named_and_mended_by_its_statements(
    embedded: Data, first: Path, production: dict[str, str], s3: S3Server, tmp_path: Path
) -> None:
    ended = backups.put_back(first, production)
    assert ended.status == 0, ended
    settings = settings_of(production, tmp_path / "nothing")
    url = sa.make_url(settings.database_url).set(drivername="postgresql+psycopg")
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")

    def run(*statements: str) -> None:
        with engine.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    try:
        run(
            "UPDATE bit_blocks SET bits = set_bit(bits, 6, 1)",
            "UPDATE counters SET n = 1",
            f"UPDATE batches SET failed = failed + 1 WHERE id = '{embedded.open_batch}'",
            "DELETE FROM blobs WHERE name LIKE '%%/index/%%'",
            "INSERT INTO outbox (project_id, subject, payload, created_ms)"
            " VALUES ('default', 'x', '\\x00', 1)",
            "SELECT setval(pg_get_serial_sequence('outbox', 'id'), 1)",
        )
        found = faults(settings)
        assert {each["kind"] for each in found} == {"results", "database", "files", "outbox"}
        for _ in range(3):
            run(*(each["sql"] for each in found if each["sql"]))
            found = faults(settings)
        assert found == []
        # What was written and never named, and what is gone.
        lost = next(name for name in s3.objects() if "/segment/" in name)
        s3.drop(lost)
        assert [each["kind"] for each in faults(settings)] == ["results"]
    finally:
        engine.dispose()
