"""The check of a data directory: quiet where all is well, and by name where something is not."""

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from services.store.checkup import doctor
from services.store.checkup.doctor import CannotCheckError
from services.store.domain.results import BLOCK_BYTES
from services.store.settings import StoreSettings
from tests.integration.store_work.harness import Store, running
from tests.kit.data_at_rest import ENDED_LINES, OPEN_LINES, Data, check, make, rounds
from tests.kit.store import chat_line, client_of, store_process

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Make the directory once; tests copy it."""
    return asyncio.run(make(tmp_path_factory.mktemp("pristine") / "data"))


@pytest.fixture
def data(pristine: Data, tmp_path: Path) -> Data:
    """Return a directory to damage."""
    return pristine.copy(tmp_path / "data")


# --- healthy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
def test_a_directory_at_rest_is_well_and_stays_as_it_is(data: Data, deep: bool) -> None:
    before = data.contents()
    found = check(data.root, deep=deep)
    assert found.faults == []
    assert found.kinds["open batches"]["counts"] == {"in_progress": 1}
    assert found.kinds["results"]["counts"] == {"segments": 2, "lines done": 5}
    assert found.kinds["chunks"]["counts"] == {"open": 2, "done": 1}
    assert found.kinds["attempts"]["counts"] == {"open": 1, "closed": 1}
    assert found.kinds["ended batches"]["counts"]["completed"] == 1
    assert found.kinds["uploads"]["counts"] == {"pending": 1, "parts": 2}
    assert found.kinds["line indexes"]["counts"]["lines"] == OPEN_LINES + ENDED_LINES
    # Nothing was made beside it either, nor touched.
    assert data.contents() == before


def test_it_says_why_a_batch_waits_for_its_end(data: Data) -> None:
    data.sql(f"UPDATE batches SET fault = 'a blob is missing' WHERE id = '{data.open_batch}'")
    found = check(data.root)
    assert found.faults == []
    assert f"{data.open_batch} waits: a blob is missing" in found.notes


async def test_a_store_may_work_meanwhile(tmp_path: Path) -> None:
    async with running(tmp_path / "data") as store:
        (tmp_path / "data" / "secret").chmod(0o600)
        await _steps(store, tmp_path / "data")


async def _steps(store: Store, root: Path) -> None:
    async def well() -> None:
        found = await asyncio.to_thread(check, root, deep=True)
        assert found.faults == []

    await well()
    batch_id = await store.batch(20)
    await well()
    dispatches = await store.cut((batch_id, 8), (batch_id, 8))
    await well()
    tokens = [(await store.open(each)).token for each in dispatches]
    await store.finish(tokens[0], range(3), batch_id)
    await well()
    await store.beat({tokens[1]: [(8, 2)]})
    await store.died({tokens[1]: [(8, 2)]})
    await well()
    await store.cancel(batch_id)
    await well()
    store.clock.advance(3)
    await store.ender.run_once()
    await well()
    await store.turn()
    await well()
    await store.sweeper.run_once()
    await well()


def test_a_store_that_was_killed_left_nothing_wrong_and_all_stays_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "data"

    async def work() -> None:
        async with client_of(store) as client:
            file = await client.upload(chat_line("a") + chat_line("b"))
            await client.create(file.id)

    with store_process(root) as store:
        asyncio.run(work())
        store.kill()
    assert (root / "nightshift.db-wal").stat().st_size
    at_rest = Data(root, "", "", "")

    def kept() -> dict[str, bytes]:
        # SQLite's shared memory is no data: readers note there that they read.
        return {
            name: content for name, content in at_rest.contents().items() if name[-4:] != "-shm"
        }

    before = kept()
    assert check(root, deep=True).faults == []
    assert kept() == before


def test_a_store_that_starts_meanwhile_is_noticed(data: Data) -> None:
    said: list[dict[str, object]] = []
    opened: list[sqlite3.Connection] = []

    def write(each: dict[str, object]) -> None:
        said.append(each)
        if not opened:
            opened.append(sqlite3.connect(data.root / "nightshift.db"))
            opened[0].execute("UPDATE batches SET completed = 0 WHERE id = ?", (data.open_batch,))
            opened[0].commit()

    try:
        assert doctor.check(StoreSettings(data_dir=data.root), write, deep=False) == 1
    finally:
        opened[0].close()
    events = [each["event"] for each in said]
    assert events.count("again") == 1
    assert "fault" not in events[: events.index("again")]
    assert "fault" in events[events.index("again") :]


# --- damaged --------------------------------------------------------------------------------------

Damage = Callable[[Data], None]
INPUT = "SELECT json_extract(parts, '$[0][0]') FROM files WHERE id = (SELECT input_file_id FROM "
INPUT += "batches WHERE id = ?)"
INDEX = "SELECT index_blob FROM batches WHERE id = ?"
OUTPUT = "SELECT json_extract(parts, '$[0][0]') FROM files WHERE of_batch_id = ? AND of_kind = ?"
PART = "SELECT blob FROM upload_parts LIMIT 1"


def _delete_input(data: Data) -> None:
    data.blob(INPUT, data.open_batch).unlink()


def _truncate_output(data: Data) -> None:
    blob = data.blob(OUTPUT, data.ended_batch, "output")
    os.truncate(blob, blob.stat().st_size - 10)


def _delete_segment_blob(data: Data) -> None:
    data.blob("SELECT blob FROM segments WHERE blob IS NOT NULL").unlink()


def _shorten_segment_blob(data: Data) -> None:
    os.truncate(data.blob("SELECT blob FROM segments WHERE blob IS NOT NULL"), 1_000)


def _swap_indexes(data: Data) -> None:
    shutil.copy(data.blob(INDEX, data.ended_batch), data.blob(INDEX, data.open_batch))


def _break_a_line(data: Data) -> None:
    blob = data.blob(INPUT, data.open_batch)
    content = bytearray(blob.read_bytes())
    content[0] ^= 1
    blob.write_bytes(content)


def _orphan(data: Data) -> None:
    (data.root / "blobs" / "default" / "file" / ("0" * 32)).write_bytes(b"lost")


def _delete_part(data: Data) -> None:
    data.blob(PART).unlink()


def _swap_part_index(data: Data) -> None:
    shutil.copy(
        data.blob(INDEX, data.open_batch), data.blob("SELECT index_blob FROM upload_parts LIMIT 1")
    )


def _open_secret(data: Data) -> None:
    (data.root / "secret").chmod(0o644)


def _shuffle_output(data: Data) -> None:
    blob = data.blob(OUTPUT, data.ended_batch, "output")
    lines = blob.read_bytes().splitlines(keepends=True)
    blob.write_bytes(b"".join(lines[::-1]))


@pytest.mark.parametrize(
    ("damage", "kind", "what", "mend"),
    [
        (_delete_input, "files", "its content, blobs/default/file/", "Restore blobs/"),
        (_truncate_output, "files", "bytes instead of", "run its batch's input again"),
        (_swap_indexes, "line indexes", "its line index, blobs/default/index/", "upload it again"),
        (_break_a_line, "line indexes", "line 0 holds something else", "delete blobs/default/"),
        (_orphan, "blobs", "is a file that no row knows", "Move it away"),
        (_delete_part, "uploads", "is gone", "begin another upload"),
        (_swap_part_index, "uploads", "its index, blobs/", "begin another upload"),
        (_open_secret, "secret", "can be read by others", "chmod 600"),
        (_shuffle_output, "ended batches", "line 0 of the batch does not come next", "again"),
    ],
)
def test_damaged_files_are_named(
    data: Data, damage: Damage, kind: str, what: str, mend: str
) -> None:
    damage(data)
    before = data.contents()
    faults = check(data.root, deep=True).faults
    (fault,) = [each for each in faults if each["kind"] == kind]
    assert what in fault["what"]
    assert mend in fault["mend"]
    assert data.contents() == before


BITS = bytearray(BLOCK_BYTES)
BITS[0] = 0b0010_1111
EXTRA = bytes([0b0110_1111, *BITS[1:]])
FEWER = bytes([0b0010_0111, *BITS[1:]])
SECOND_RESULT = """INSERT INTO segments SELECT id + 100, batch_id, project_id, version + 100,
first_line, last_line, records, payload, blob FROM segments WHERE blob IS NULL"""
FAR = 4_000_000_000_000


@pytest.mark.parametrize(
    ("statement", "kind", "what"),
    [
        (f"UPDATE bit_blocks SET bits = X'{EXTRA.hex()}'", "results", "line 6 marked as done with"),
        (f"UPDATE bit_blocks SET bits = X'{FEWER.hex()}'", "results", "line 3 with a result and"),
        ("DELETE FROM bit_blocks", "results", "lines 0-3, 5 have a result, and no block"),
        ("UPDATE batches SET failed = failed + 1 WHERE id = :open", "results", "failed is 1;"),
        ("UPDATE batches SET lines_done = 9 WHERE id = :open", "results", "lines_done is 9;"),
        ("UPDATE batches SET output_tokens = 1 WHERE id = :open", "results", "output_tokens is 1"),
        ("DELETE FROM segments WHERE blob IS NULL", "results", "line 5 marked as done without"),
        ("DELETE FROM segments WHERE blob IS NOT NULL", "chunks", "lines 0-3 have no result, but"),
        ("UPDATE segments SET first_line = 2, last_line = 2", "results", "says lines 2 to 2"),
        ("UPDATE segments SET records = X'00'", "results", "its records are cut off"),
        (
            "UPDATE segments SET payload = zeroblob(length(payload)) WHERE blob IS NULL",
            "results",
            "are not one line each",
        ),
        (
            SECOND_RESULT,
            "results",
            "line 5 have a second result",
        ),
        ("UPDATE batches SET lines_cut = 4 WHERE id = :open", "chunks", "chunks up to line 8"),
        ("UPDATE chunks SET state = 'done'", "chunks", "lines 7-8 have no result, but their chunk"),
        ("UPDATE chunks SET line_count = 99", "chunks", "says 99 lines from"),
        ("UPDATE chunks SET pool_id = 'other'", "chunks", "is queued for pool other"),
        ("UPDATE chunks SET dispatch = 7", "attempts", "is open under dispatch 1, but its chunk"),
        ("UPDATE chunks SET attempts = 0", "attempts", "is number 1, but its chunk counts 0"),
        ("UPDATE batches SET sealed_ms = 1 WHERE id = :open", "open batches", "is half sealed"),
        ("UPDATE batches SET completed_at = 1 WHERE id = :open", "open batches", "completed_at"),
        ("UPDATE batches SET input_parts = '[]' WHERE id = :open", "open batches", "other blobs"),
        ("UPDATE batches SET completed_at = NULL WHERE id = :ended", "ended batches", "has no "),
        (
            "UPDATE batches SET sealed_ms = NULL, seal_outcome = NULL WHERE id = :ended",
            "ended batches",
            "is completed and not sealed",
        ),
        (
            "UPDATE batches SET seal_outcome = 'expired' WHERE id = :ended",
            "ended batches",
            "sealed",
        ),
        ("UPDATE batches SET lines_done = 4 WHERE id = :ended", "ended batches", "4 of 5 lines"),
        ("UPDATE batches SET output_file_id = NULL WHERE id = :ended", "ended batches", "names no"),
        ("UPDATE bit_blocks SET batch_id = :ended", "ended batches", "has rows in bit_blocks"),
        ("UPDATE files SET bytes = bytes + 1 WHERE of_batch_id IS NULL", "files", "and parts of"),
        ("DELETE FROM blobs WHERE name LIKE '%/index/%'", "files", "has no row of its own"),
        ("UPDATE blobs SET state = 'doomed' WHERE name LIKE '%/file/%'", "files", "is doomed by"),
        ("DELETE FROM upload_parts", "uploads", "counts 2 parts of"),
        ("UPDATE uploads SET status = 'cancelled', ended_at = 1", "uploads", "still has 2 parts"),
        ("UPDATE counters SET n = 1", "database", "seq stands at 1, but"),
        (f"UPDATE leadership SET until_ms = {FAR}", "leadership", "no other can lead"),
        ("UPDATE outbox SET payload = X'FF'", "outbox", "cannot be told"),
        ("UPDATE sqlite_sequence SET seq = 0 WHERE name = 'outbox'", "outbox", "beyond the last"),
        ("UPDATE projects SET quota_bytes = -1", "projects", "a quota of -1 bytes"),
        (f"INSERT INTO sweep_holds VALUES ('h', {FAR})", "holds", "keeps every blob for"),
        (
            "INSERT INTO batch_engines VALUES (:open, 'p', 'r', 'other', 1)",
            "projects",
            "noted for project other",
        ),
        (
            "INSERT INTO idempotency_keys VALUES ('default', 'k', 'f', 'batch_gone', 1)",
            "keys",
            "was made under an idempotency key, and is not there",
        ),
    ],
)
def test_damaged_rows_are_named_and_their_statements_mend_them(
    data: Data, statement: str, kind: str, what: str
) -> None:
    statement = statement.replace(":open", f"'{data.open_batch}'")
    statement = statement.replace(":ended", f"'{data.ended_batch}'")
    data.sql(statement)
    looks = list(rounds(data))
    assert any(what in each for each in looks[0].of(kind)), looks[0].faults
    assert all(fault["mend"] for fault in looks[0].faults)
    assert looks[-1].faults == []


@pytest.mark.parametrize(
    ("statement", "kind", "what"),
    [
        ("DELETE FROM files WHERE of_kind = 'error'", "ended batches", "but it is not there"),
        ("UPDATE batches SET status = 'lost' WHERE id = :ended", "open batches", "which there is"),
        ("UPDATE batches SET key_id = 'key_x' WHERE id = :ended", "keys", "created by key key_x"),
        ("DELETE FROM pools", "database", "names a row of pools that is not there"),
        ("DROP INDEX ix_batches_window", "database", "has no index ix_batches_window"),
        ("DROP TABLE outbox", "outbox", "no such table"),
        ("UPDATE files SET parts = '{' WHERE of_batch_id IS NULL", "files", "cannot be read"),
        ("UPDATE files SET parts = '[7]' WHERE of_batch_id IS NULL", "files", "list of parts"),
        (
            "UPDATE files SET parts = '[[\"../../secret\", 65]]' WHERE of_batch_id IS NULL",
            "files",
            "which no blob is called",
        ),
    ],
)
def test_rows_that_no_statement_mends_are_named(
    data: Data, statement: str, kind: str, what: str
) -> None:
    data.sql(statement.replace(":ended", f"'{data.ended_batch}'"))
    found = check(data.root)
    assert any(what in each for each in found.of(kind)), found.faults
    assert all(fault["mend"] for fault in found.faults)


@pytest.mark.parametrize("damage", [_delete_segment_blob, _shorten_segment_blob])
def test_lost_results_run_again_once_their_statements_were_run(data: Data, damage: Damage) -> None:
    damage(data)
    looks = list(rounds(data))
    assert "the results of lines 0, 3, blobs/default/segment/" in looks[0].of("results")[0]
    # Its blob is named by nothing then, and goes.
    assert looks[-1].faults == []

    async def finish() -> None:
        async with running(data.root) as store:
            await store.cut((data.open_batch, OPEN_LINES))
            # All that was out when the store stopped has lost its lease, too.
            store.clock.advance(20)
            for dispatch in await store.reclaim():
                opened = await store.open(dispatch)
                lines = [n for r in opened.lines for n in range(r.first, r.first + r.count)]
                await store.finish(opened.token, lines, data.open_batch)
            await store.turn()
            output, error = await store.end_files(data.open_batch)
            assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(OPEN_LINES)]
            assert error == []

    asyncio.run(finish())


def test_damaged_pages_are_told_apart_from_what_can_be_read(data: Data) -> None:
    page = data.one("SELECT rootpage FROM sqlite_master WHERE name = 'outbox'")
    size = data.one("PRAGMA page_size")
    with (data.root / "nightshift.db").open("r+b") as database:
        database.seek((page - 1) * size)
        database.write(b"\xff" * size)
    found = check(data.root)
    assert found.of("database")
    assert "nightshift.db: cannot be read to its end: database disk image is malformed" in found.of(
        "outbox"
    )
    assert found.kinds["results"]["faults"] == 0
    assert not any("takes room" in fault["what"] for fault in found.faults)


# --- cannot be told -------------------------------------------------------------------------------


def test_what_cannot_be_checked_is_said(data: Data, tmp_path: Path) -> None:
    with pytest.raises(CannotCheckError, match=r"there is no .*name the directory"):
        check(tmp_path)
    data.sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(CannotCheckError, match="a newer version"):
        check(data.root)
    (data.root / "nightshift.db").write_bytes(b"no database at all, only text" * 1_000)
    with pytest.raises(CannotCheckError, match="cannot be read"):
        check(data.root)
