"""Blobs that are lost: the mends that the check gives, and backups of what is left."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, files_pb2
from services.kit.wire.errors import LostError
from services.store.backup.copy_blobs import CopyError
from services.store.backup.target import BackupError
from services.store.tables.core import batches
from tests.integration.store_work.harness import Store, running
from tests.kit import backups
from tests.kit.data_at_rest import ENDED_LINES, OPEN_LINES, Data, check, make
from tests.kit.store import our_errors

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CANCELLED = batches_pb2.BATCH_STATUS_CANCELLED
INDEX = "SELECT index_blob FROM batches WHERE id = ?"
INPUT = "SELECT json_extract(input_parts, '$[0][0]') FROM batches WHERE id = ?"
SEGMENT = "SELECT blob FROM segments WHERE blob IS NOT NULL"
OUTPUT = (
    "SELECT json_extract(parts, '$[0][0]') FROM files WHERE of_batch_id = ? AND of_kind = 'output'"
)
PART = "SELECT blob FROM upload_parts WHERE upload_id = ? ORDER BY id LIMIT 1"
PART_INDEX = "SELECT index_blob FROM upload_parts WHERE upload_id = ? ORDER BY id DESC LIMIT 1"

Damage = Callable[[Data], Path]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Make a data directory once: a batch half done, one that ended, an upload begun."""
    return asyncio.run(make(tmp_path_factory.mktemp("pristine") / "data"))


@pytest.fixture
def data(pristine: Data, tmp_path: Path) -> Data:
    """Return a copy to damage."""
    return pristine.copy(tmp_path / "data")


def input_of(data: Data) -> Path:
    return data.blob(INPUT, data.open_batch)


def output_of(data: Data) -> Path:
    return data.blob(OUTPUT, data.ended_batch)


def results_of(data: Data) -> Path:
    return data.blob(SEGMENT)


def index_of(data: Data) -> Path:
    return data.blob(INDEX, data.open_batch)


async def delete(store: Store, file_id: str) -> None:
    with our_errors():
        await store.files.DeleteFile(
            files_pb2.DeleteFileRequest(file_id=file_id), metadata=store.metadata
        )


# --- what the check says --------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [False, True])
def test_an_index_that_the_store_makes_again_is_no_fault(data: Data, cut: bool) -> None:
    blob = index_of(data)
    if cut:
        os.truncate(blob, 100)
    else:
        blob.unlink()
    found = check(data.root, deep=True)
    assert found.faults == []
    (note,) = [
        each for each in found.notes if f"its line index, blobs/default/index/{blob.name}" in each
    ]
    assert "makes it again" in note

    async def work() -> None:
        async with running(data.root) as store:
            (cut_now,) = await store.cut((data.open_batch, OPEN_LINES))
            assert [(each.first, each.count) for each in cut_now.lines] == [(9, 1)]
            await store.sweeper.run_once()

    asyncio.run(work())
    found = check(data.root, deep=True)
    assert found.faults == []
    assert not any("line index" in each for each in found.notes)


async def test_the_mend_of_a_wrong_index_works(data: Data) -> None:
    index = index_of(data)
    index.write_bytes(data.blob(INDEX, data.ended_batch).read_bytes())
    (fault,) = check(data.root, deep=True).faults
    assert f"delete blobs/default/index/{index.name}" in fault["mend"]
    index.unlink()
    async with running(data.root) as store:
        await store.cut((data.open_batch, OPEN_LINES))
        await store.sweeper.run_once()
    assert check(data.root, deep=True).faults == []


async def test_the_mend_of_a_lost_input_works(data: Data) -> None:
    input_of(data).unlink()
    (fault,) = check(data.root, deep=True).faults
    assert "delete the file, upload it again, and cancel the batches" in fault["mend"]
    async with running(data.root) as store:
        await delete(store, fault["subject"])
        await store.cancel(data.open_batch)
        store.clock.advance(3)
        await store.turn()
        batch = await store.get(data.open_batch)
        assert batch.status == CANCELLED
        output, error = await store.end_files(data.open_batch)
        assert [line["custom_id"] for line in output] == ["r0", "r1", "r2", "r3", "r5"]
        assert [line["custom_id"] for line in error] == [None] * 5
        await store.turn()
        await store.sweeper.run_once()
    assert check(data.root, deep=True).faults == []


async def test_the_mend_of_lost_results_of_a_sealed_batch_works(data: Data) -> None:
    async with running(data.root) as store:
        store.clock.advance(30)
        for dispatch in [*await store.cut((data.open_batch, 9)), *await store.reclaim()]:
            opened = await store.open(dispatch)
            for each in opened.lines:
                lines = range(each.first, each.first + each.count)
                await store.finish(opened.token, lines, data.open_batch)
    blob = results_of(data)
    blob.unlink()
    (fault,) = check(data.root, deep=True).faults
    assert fault["sql"] == ""
    assert "cancel the batch" in fault["mend"]
    async with running(data.root) as store:
        await store.turn()
        await store.cancel(data.open_batch)
        await store.turn()
        batch = await store.get(data.open_batch)
        assert batch.status == CANCELLED
        assert [error.code for error in batch.errors] == ["results_lost"]
        _, error = await store.end_files(data.open_batch)
        assert [line["custom_id"] for line in error] == ["r0", "r1", "r2", "r3"]
        await store.turn()
        await store.sweeper.run_once()
    assert check(data.root, deep=True).faults == []


async def test_the_mend_of_a_lost_end_file_works(data: Data) -> None:
    output_of(data).unlink()
    (fault,) = check(data.root, deep=True).faults
    assert "delete the file and run its batch's input again" in fault["mend"]
    async with running(data.root) as store:
        with pytest.raises(LostError, match="run its batch's input again"):
            await store.download(fault["subject"])
        await delete(store, fault["subject"])
        await store.sweeper.run_once()
    assert check(data.root, deep=True).faults == []


# --- backups ------------------------------------------------------------------------------------


async def test_a_backup_goes_on_without_what_is_lost(data: Data, tmp_path: Path) -> None:
    lost = [input_of(data), output_of(data), results_of(data), index_of(data)]
    for blob in lost:
        blob.unlink()
    names = tuple(sorted(str(blob.relative_to(data.root / "blobs")) for blob in lost))
    before = {fault["what"] for fault in check(data.root, deep=True).faults}
    facts = await backups.take_here(data.root, tmp_path / "backup")
    assert facts.missing == names
    restored = await backups.put_back_here(tmp_path / "backup", tmp_path / "place")
    assert restored.missing == names
    for place in (tmp_path / "backup", tmp_path / "place"):
        assert {fault["what"] for fault in check(place, deep=True).faults} == before

    # All else goes on there; what needs what is lost says so.
    async with running(tmp_path / "place") as store:
        with pytest.raises(LostError):
            await store.download((await store.get(data.ended_batch)).output_file_id)
        batch = await store.get(data.ended_batch)
        assert len((await store.download(batch.error_file_id)).splitlines()) == 1
        assert batch.request_counts.total == ENDED_LINES
        await store.cut((data.open_batch, 1))
        assert "missing" in (await store.get(data.open_batch)).nightshift.reason


async def test_rows_are_backed_up_even_if_all_blobs_are_lost(data: Data, tmp_path: Path) -> None:
    blobs = [each for each in (data.root / "blobs").rglob("*") if each.is_file()]
    for blob in blobs:
        blob.unlink()
    facts = await backups.take_here(data.root, tmp_path / "backup")
    assert (facts.blobs, len(facts.missing)) == (0, len(blobs))
    await backups.put_back_here(tmp_path / "backup", tmp_path / "place")


async def test_an_older_backup_has_what_was_lost_since(data: Data, tmp_path: Path) -> None:
    await backups.take_here(data.root, tmp_path / "old")
    input_of(data).unlink()
    facts = await backups.take_here(data.root, tmp_path / "new", tmp_path / "old")
    assert facts.missing == ()
    assert check(tmp_path / "new", deep=True).faults == []


async def test_an_older_backup_has_what_was_cut_off_since(data: Data, tmp_path: Path) -> None:
    await backups.take_here(data.root, tmp_path / "old")
    for blob in (input_of(data), output_of(data)):
        os.truncate(blob, 10)
    await backups.take_here(data.root, tmp_path / "new", tmp_path / "old")
    assert check(tmp_path / "new", deep=True).faults == []


def test_a_blob_that_its_disk_does_not_give_is_named(data: Data, tmp_path: Path) -> None:
    blob = output_of(data)
    blob.unlink()
    blob.mkdir()
    taken = backups.take(data.root, tmp_path / "backup")
    assert taken.status == 2
    assert f"{blob.name} cannot be read" in taken.said["why"]
    assert "Traceback" not in taken.errors


async def test_what_is_lost_of_a_backup_keeps_it_from_being_put_back(
    data: Data, tmp_path: Path
) -> None:
    input_of(data).unlink()
    backup = tmp_path / "backup"
    await backups.take_here(data.root, backup)
    (backup / output_of(data).relative_to(data.root)).unlink()
    with pytest.raises(BackupError, match="--with-faults"):
        await backups.put_back_here(backup, tmp_path / "place")
    with pytest.raises(CopyError, match="is gone"):
        await backups.put_back_here(backup, tmp_path / "place", with_faults=True)


async def test_a_backup_whose_blob_was_cut_short_since_is_put_back_on_demand(
    data: Data, tmp_path: Path
) -> None:
    backup = tmp_path / "backup"
    await backups.take_here(data.root, backup)
    os.truncate(backup / output_of(data).relative_to(data.root), 10)
    with pytest.raises(BackupError, match="has 1 faults"):
        await backups.put_back_here(backup, tmp_path / "place")
    await backups.put_back_here(backup, tmp_path / "place", with_faults=True)
    async with running(tmp_path / "place") as store:
        query = sa.select(batches.c.status).order_by(batches.c.seq)
        assert [row.status for row in await store.sql(query)] == ["completed", "in_progress"]


@pytest.mark.parametrize("bytes_more", [-1, 1])
async def test_a_backup_names_what_has_another_size_than_its_rows_say(
    data: Data, tmp_path: Path, bytes_more: int
) -> None:
    """What is left of it is kept, and it counts as lost, there and where it is put back."""
    damaged = [input_of(data), output_of(data), data.blob(PART, data.upload)]
    if bytes_more < 0:
        damaged += [results_of(data), data.blob(PART_INDEX, data.upload)]
    for blob in damaged:
        content = blob.read_bytes()
        blob.write_bytes(content[:bytes_more] if bytes_more < 0 else content + b"x")
    names = tuple(sorted(str(blob.relative_to(data.root / "blobs")) for blob in damaged))
    before = {fault["what"] for fault in check(data.root).faults}
    assert len(before) == len(names)
    taken = backups.take(data.root, tmp_path / "backup")
    assert taken.status == 1
    assert tuple(taken.said["missing"]) == names
    restored = await backups.put_back_here(tmp_path / "backup", tmp_path / "place")
    assert restored.missing == names
    for place in (tmp_path / "backup", tmp_path / "place"):
        assert {fault["what"] for fault in check(place).faults} == before


async def test_what_a_row_says_of_its_blobs_in_vain_keeps_no_backup_from_being_made(
    data: Data, tmp_path: Path
) -> None:
    data.sql("UPDATE files SET parts = '[[1, 2, 3], 4' WHERE of_batch_id IS NOT NULL")
    data.sql("UPDATE segments SET records = x'00' WHERE blob IS NOT NULL")
    assert (await backups.take_here(data.root, tmp_path / "backup")).missing == ()


def test_the_commands_warn(data: Data, tmp_path: Path) -> None:
    blob = output_of(data)
    blob.unlink()
    backup = tmp_path / "backup"
    taken = subprocess.run(
        [
            *(sys.executable, "-m", "services.cli.main", "backup"),
            *("--to", str(backup), "--data", str(data.root)),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert taken.returncode == 1
    assert "backed up to" in taken.stdout
    assert "lost 1 of its blobs" in taken.stderr
    assert blob.name in taken.stderr
    restored = backups.put_back(backup, tmp_path / "place")
    assert restored.status == 1
    assert restored.said["event"] == "done"
    (name,) = restored.said["missing"]
    assert name.endswith(blob.name)
