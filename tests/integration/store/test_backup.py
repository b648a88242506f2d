"""Backup and restore: what was acknowledged before is there after, each line once."""

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import files_pb2
from services.kit.process.settings import SettingsError
from services.kit.wire.errors import NotFoundError
from services.store.backup.after_restore import LEAP
from services.store.backup.copy_blobs import CopyError
from services.store.backup.target import BackupError
from services.store.checkup.database_check import SchemaError
from services.store.db.only_store import only_store
from services.store.tables.core import batches
from tests.integration.store_work.harness import running
from tests.kit import backups
from tests.kit.data_at_rest import OPEN_LINES, Data, check, make
from tests.kit.eventually import eventually
from tests.kit.store import chat_line

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Make a data directory once: a batch half done, one that ended, an upload begun."""
    return asyncio.run(make(tmp_path_factory.mktemp("pristine") / "data"))


@pytest.fixture(scope="module")
def whole(pristine: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Take a backup of it once."""
    to = tmp_path_factory.mktemp("backup") / "backup"
    asyncio.run(backups.take_here(pristine.root, to))
    return to


# --- the backup -----------------------------------------------------------------------------------


def test_a_backup_is_a_data_directory_in_which_all_is_well(pristine: Data, whole: Path) -> None:
    found = check(whole, deep=True)
    assert found.faults == []
    assert found.kinds["open batches"]["counts"] == {"in_progress": 1}
    # Nothing runs in a copy.
    assert found.kinds["attempts"]["counts"] == {"open": 0, "closed": 2}
    assert found.kinds["blobs"]["counts"]["live"] == found.kinds["blobs"]["counts"]["files"]
    assert whole.stat().st_mode & 0o777 == 0o700
    assert (whole / "nightshift.db").stat().st_mode & 0o777 == 0o600
    # The services' secret is made anew where it is put back.
    assert sorted(each.name for each in whole.iterdir()) == [
        "backup.json",
        "blobs",
        "nightshift.db",
    ]
    # The source is as it was; the hold on its sweeper is gone.
    assert check(pristine.root, deep=True).faults == []
    assert pristine.one("SELECT count(*) FROM sweep_holds") == 0


async def test_what_an_older_backup_has_is_linked(
    pristine: Data, whole: Path, tmp_path: Path
) -> None:
    facts = await backups.take_here(pristine.root, tmp_path / "next", whole)
    blobs = [each for each in (tmp_path / "next" / "blobs").rglob("*") if each.is_file()]
    assert len(blobs) == facts.blobs > 3
    assert {each.stat().st_nlink for each in blobs} == {2}
    assert check(tmp_path / "next", deep=True).faults == []


async def test_what_cannot_be_backed_up_is_said(
    pristine: Data, whole: Path, tmp_path: Path
) -> None:
    async def why(data: Path, to: Path) -> str:
        with pytest.raises((BackupError, CopyError, SchemaError)) as refused:
            await backups.take_here(data, to)
        return str(refused.value)

    assert "there is no" in await why(tmp_path / "nothing", tmp_path / "to")
    assert not (tmp_path / "to").exists()
    assert "is a whole backup already" in await why(pristine.root, whole)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").write_text("mine")
    assert "is not empty" in await why(pristine.root, tmp_path / "used")
    data = pristine.copy(tmp_path / "data")
    assert "lies within" in await why(data.root, data.root / "blobs" / "backup")
    (data.root / "blobs").rename(data.root / "away")
    assert "is mounted" in await why(data.root, tmp_path / "lost")
    with pytest.raises(BackupError, match="was not finished"):
        await backups.put_back_here(tmp_path / "lost", tmp_path / "place")
    data.sql("UPDATE alembic_version SET version_num = '0001'")
    assert "an older version" in await why(data.root, tmp_path / "older")


@pytest.mark.timeout(240)
async def test_a_backup_that_is_killed_is_not_taken_for_one_and_is_gone_on_with(
    pristine: Data, tmp_path: Path
) -> None:
    data = pristine.copy(tmp_path / "data")
    to = tmp_path / "backup"
    # Every step, and stopped as well: tests/integration/crash_windows/test_backups.py.
    for place in ("backup.blob:after@3", "backup.finish:before"):
        ended = await asyncio.to_thread(backups.take, data.root, to, failpoint=f"{place}=kill")
        assert ended.status == -signal.SIGKILL, (place, ended)
        with pytest.raises(BackupError, match="was not finished"):
            await backups.put_back_here(to, tmp_path / "place")
    # What the store has dropped since an earlier try copied it.
    dropped = to / "blobs" / "default" / "file" / ("0" * 32)
    assert dropped.parent.is_dir()
    dropped.write_bytes(b"dropped")
    ended = await asyncio.to_thread(
        backups.take, data.root, to, failpoint="backup.finish:after=kill"
    )
    assert ended.status == -signal.SIGKILL, ended
    # That one is whole.
    assert not dropped.exists()
    assert check(to, deep=True).faults == []
    await backups.put_back_here(to, tmp_path / "place")


async def test_what_is_deleted_while_it_is_copied_is_in_the_backup(tmp_path: Path) -> None:
    async with running(tmp_path / "data") as store:
        content = chat_line("a") * 100
        file = await store.upload(content)
        frozen = await asyncio.to_thread(
            backups.begin,
            tmp_path / "data",
            *("take", "--to", str(tmp_path / "backup")),
            failpoint="backup.blob:before=freeze",
        )
        try:
            await eventually(lambda: _is_stopped(frozen.pid), within_seconds=60)
            await store.files.DeleteFile(
                files_pb2.DeleteFileRequest(file_id=file.id), metadata=store.metadata
            )
            later = await store.upload(chat_line("later"))
            await store.sweeper.run_once()
            assert len(list((tmp_path / "data" / "blobs").rglob("*/file/*"))) == 2
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
            ended = await asyncio.to_thread(backups.end, frozen)
        assert ended.status == 0, ended
        # Once nobody holds it any more, it goes.
        await store.sweeper.run_once()
        kept = list((tmp_path / "data" / "blobs").rglob("*/file/*"))
        assert [each.read_bytes() for each in kept] == [chat_line("later")]
    assert check(tmp_path / "backup", deep=True).faults == []
    place = tmp_path / "place"
    await backups.put_back_here(tmp_path / "backup", place)
    async with running(place) as store:
        assert await store.download(file.id) == content
        with pytest.raises(NotFoundError):
            await store.download(later.id)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


# --- putting it back ------------------------------------------------------------------------------


async def test_a_batch_in_flight_goes_on_and_messages_of_another_time_do_no_harm(
    tmp_path: Path,
) -> None:
    async with running(tmp_path / "data") as store:
        batch_id = await store.batch(OPEN_LINES)
        before = await store.cut((batch_id, 6), (batch_id, 4))
        opened = await store.open(before[0])
        await store.finish(opened.token, range(2), batch_id)
        await backups.take_here(tmp_path / "data", tmp_path / "backup")
        term = (await store.lead()).term
        # It runs on, as if the backup had not been; that is the time that is forgotten.
        await store.hand_back(opened.token)
        store.clock.advance(30)
        after = await store.reclaim()
        assert {each.dispatch for each in after} == {2}
        version = (await store.sql(sa.select(batches.c.version)))[0][0]
    place = tmp_path / "place"
    await backups.put_back_here(tmp_path / "backup", place)
    async with running(place) as store:
        (place / "secret").chmod(0o600)
        for message in (*before, *after):
            answer = await store.deliver(message, delivered=2)
            assert answer.WhichOneof("outcome") == "gone"
        # What an executor still sends under an old token counts, as ever.
        assert await store.finish(opened.token, [2], batch_id) == 1
        assert (await store.lead("scheduler-1")).term > term + LEAP
        # So does who follows the batch, with the id of an event that is forgotten.
        assert (await store.sql(sa.select(batches.c.version)))[0][0] > version + 100
        dispatches = await store.reclaim()
        assert sorted(each.dispatch for each in dispatches) == [2 * LEAP + 2] * 2
        for dispatch in dispatches:
            again = await store.open(dispatch)
            # Nobody is to blame for what a copy forgets.
            assert again.deaths == 0
            lines = [n for each in again.lines for n in range(each.first, each.first + each.count)]
            assert await store.finish(again.token, lines, batch_id) == len(lines)
        await store.turn()
        output, error = await store.end_files(batch_id)
        assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(OPEN_LINES)]
        assert error == []
    assert check(place, deep=True).faults == []


async def test_an_event_gets_a_number_that_no_message_ever_had(whole: Path, tmp_path: Path) -> None:
    await backups.put_back_here(whole, tmp_path / "place")
    with contextlib.closing(sqlite3.connect(tmp_path / "place" / "nightshift.db")) as connection:
        (given,) = connection.execute("SELECT seq FROM sqlite_sequence").fetchone()
    assert given > 1_700_000_000_000


@pytest.mark.timeout(240)
async def test_a_restore_that_is_killed_is_gone_on_with(whole: Path, tmp_path: Path) -> None:
    async def killed(step: str) -> None:
        ended = await asyncio.to_thread(backups.put_back, whole, place, failpoint=f"{step}=kill")
        assert ended.status == -signal.SIGKILL, (step, ended)

    place = tmp_path / "place"
    for step in ("restore.begin:after", "restore.blob:after@3"):
        await killed(step)
        assert not (place / "nightshift.db").exists()
        # A store that is started on it would begin anew, beside what was copied.
        with (
            pytest.raises(SettingsError, match="run the same `nightshift restore` again"),
            only_store(place),
        ):
            pass
    await killed("restore.finish:after")
    with only_store(place):
        pass
    assert check(place, deep=True).faults == []
    with pytest.raises(BackupError, match="empty store only"):
        await backups.put_back_here(whole, place)


async def test_what_cannot_be_put_back_is_said(whole: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(whole, tmp_path / name))

    async def why(backup: Path, place: Path = tmp_path / "place") -> str:
        with pytest.raises(BackupError) as refused:
            await backups.put_back_here(backup, place)
        assert not (place / "nightshift.db").exists()
        return str(refused.value)

    (tmp_path / "no").mkdir()
    assert "is no backup" in await why(tmp_path / "no")
    used = copy("used")
    with contextlib.closing(sqlite3.connect(used / "nightshift.db")) as connection:
        connection.execute("UPDATE projects SET created_at = 7")
        connection.commit()
    assert "used as a data directory" in await why(used)
    newer = copy("newer")
    (newer / "backup.json").write_text('{"format": 2, "version": "9.9"}')
    assert "format 2" in await why(newer)
    lost = copy("lost")
    next(iter((lost / "blobs").rglob("*/file/*"))).unlink()
    assert "doctor --check" in await why(lost)
    strange = tmp_path / "strange" / "blobs" / "default" / "file"
    strange.mkdir(parents=True)
    (strange / ("0" * 32)).write_bytes(b"another's")
    assert "there is a blob" in await why(whole, tmp_path / "strange")
