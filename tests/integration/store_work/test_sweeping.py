"""What nothing names any more leaves the directory or the bucket: looked at from outside."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import files_pb2
from services.kit.wire.errors import NotFoundError, UnavailableError
from services.store.blobs import blobs_repo, holds_repo
from services.store.blobs.s3.blobs import S3Blobs
from services.store.files import intake
from services.store.tables.core import blobs, files, segments, sweep_holds
from tests.integration.store_work.harness import Store, running
from tests.kit.eventually import eventually
from tests.kit.s3_server import Fault, S3Server, s3_server
from tests.kit.store import chat_line, our_errors
from tests.kit.streams import told
from tests.kit.uploads import add, cancel, complete, create

pytestmark = [pytest.mark.integration, pytest.mark.slow]

HOUR = files_pb2.ExpiresAfter(anchor="created_at", seconds=3600)
DAY_SECONDS = 24 * 3600
CONTENT = b"a text that nobody else writes"
LATE_SECONDS = S3Blobs.late_seconds


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["bucket", "directory"])
async def swept(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Store]:
    """Run a store on either place for blobs."""
    settings = {}
    if request.param == "bucket":
        server: S3Server = request.getfixturevalue("bucket")
        server.fault(None)
        server.empty()
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        settings["blobs_url"] = server.url
    async with running(tmp_path / "data", **settings) as store:
        yield store


@pytest.fixture
def lying(request: pytest.FixtureRequest, swept: Store) -> "Lying":
    on_s3 = bool(swept.context.settings.blobs_url)
    server = request.getfixturevalue("bucket") if on_s3 else None
    return Lying(swept.store.data / "blobs", server)


class Lying:
    """What lies there, by listing it."""

    def __init__(self, root: Path, server: S3Server | None) -> None:
        self._root = root
        self._server = server

    def __call__(self) -> set[str]:
        if self._server is not None:
            assert self._server.unfinished() == []
            return set(self._server.objects())
        files = (file for file in self._root.rglob("*") if file.is_file())
        return {str(file.relative_to(self._root)) for file in files}


async def sweep(store: Store) -> int:
    """Sweep once nothing can arrive late any more."""
    store.clock.advance(store.context.blobs.late_seconds)
    return await store.sweeper.run_once()


async def rows(store: Store) -> dict[str, str]:
    return {row.name: row.state for row in await store.sql(sa.select(blobs))}


async def delete(store: Store, file_id: str) -> None:
    await store.files.DeleteFile(
        files_pb2.DeleteFileRequest(file_id=file_id), metadata=store.metadata
    )


async def test_a_batch_leaves_its_end_files_and_then_nothing(swept: Store, lying: Lying) -> None:
    file = await swept.upload(b"".join(chat_line(f"r{line}") for line in range(5)))
    batch = await swept.create(file.id)
    await swept.validated(batch.id)
    (dispatch,) = await swept.cut((batch.id, 5))
    token = (await swept.open(dispatch)).token
    for line in range(4):
        # Each above what stays in its row.
        assert await swept.finish(token, [line], batch.id, answer="x" * 300_000) == 1
    # And one that does.
    assert await swept.finish(token, [4], batch.id, answer=CONTENT.decode()) == 1
    assert written(swept) == (swept.context.db.file is not None)
    assert len(lying()) == 2 + 4
    assert len(await swept.sql(sa.select(segments.c.blob))) == 5
    await swept.turn()
    swept.clock.advance(3600)
    await swept.turn()
    await sweep(swept)
    output, _ = await swept.end_files(batch.id)
    assert [line["custom_id"] for line in output] == [f"r{line}" for line in range(5)]
    # Input, index and the output.
    assert len(lying()) == 3
    assert lying() == set(await rows(swept))
    await delete(swept, file.id)
    await delete(swept, (await swept.get(batch.id)).output_file_id)
    await sweep(swept)
    assert lying() == set()
    assert await rows(swept) == {}
    # Nor in pages of the database that are free, or in its log.
    assert not written(swept)


def written(store: Store) -> bool:
    """Whether `CONTENT` stands anywhere in the database's files."""
    return any(CONTENT in file.read_bytes() for file in store.store.data.glob("nightshift.db*"))


@pytest.mark.parametrize("swept", ["directory"], indirect=True)
async def test_files_of_many_parts_are_given_up_a_few_at_a_time(
    swept: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else writes while a transaction lasts."""
    in_transactions: list[int] = []
    db_write, doom = swept.context.db.write, blobs_repo.doom

    def counted(connection: sa.Connection, names: Sequence[str]) -> None:
        in_transactions[-1] += len(names)
        doom(connection, names)

    async def write(step: str, statement: Callable[[sa.Connection], Any]) -> Any:
        in_transactions.append(0)
        return await db_write(step, statement)

    for size in (600, 600, 600, 1, 1):
        file = await swept.upload(chat_line("r0"))
        parts = [[f"default/part/{file.id}-{number}", 1] for number in range(size)]
        many = files.update().where(files.c.id == file.id).values(parts=parts, index_blob=None)
        await db_write("test.parts", lambda connection, many=many: connection.execute(many))
        await delete(swept, file.id)
    monkeypatch.setattr(blobs_repo, "doom", counted)
    monkeypatch.setattr(swept.context.db, "write", write)
    await swept.sweeper.run_once()
    assert sum(in_transactions) == 1_802
    assert max(in_transactions) <= 1_000
    assert await swept.sql(sa.select(files.c.id).where(files.c.purged_at.is_(None))) == []


async def test_results_that_were_not_the_first_leave(swept: Store, lying: Lying) -> None:
    batch_id = await swept.batch(2)
    (dispatch,) = await swept.cut((batch_id, 2))
    token = (await swept.open(dispatch)).token
    assert await swept.finish(token, [0], batch_id, answer="x" * 300_000) == 1
    there = lying()
    assert await swept.finish(token, [0], batch_id, answer="y" * 300_000) == 0
    assert len(lying()) == len(there) + 1
    await sweep(swept)
    assert lying() == there


async def test_expired_files_and_ended_uploads_leave(swept: Store, lying: Lying) -> None:
    await swept.upload(chat_line("r0"), expires_after=HOUR)
    upload = await create(swept, len(chat_line("r0")))
    await add(swept, upload.id, chat_line("r1"))
    part = await add(swept, upload.id, chat_line("r1"))
    await complete(swept, upload.id, [part])
    given_up = await create(swept, 10)
    await add(swept, given_up.id, b"0123456789")
    await cancel(swept, given_up.id)
    left = await create(swept, 10)
    await add(swept, left.id, b"0123456789")
    swept.clock.advance(3600)
    await sweep(swept)
    # The completed upload's file, and its index.
    assert len(lying()) == 2
    assert set((await rows(swept)).values()) == {"live"}


async def test_what_was_announced_and_never_named_leaves_after_a_day(
    swept: Store, lying: Lying
) -> None:
    name = await intake.announce(swept.context, "default", "part")  # type: ignore[arg-type]
    await swept.context.blobs.put("test.step", name, b"of a store that was killed")
    swept.clock.advance(DAY_SECONDS)
    await sweep(swept)
    assert lying() == {name}
    swept.clock.advance(1)
    await swept.sweeper.run_once()
    await sweep(swept)
    assert lying() == set()
    assert await rows(swept) == {}
    # And it can be named no more, so that no commit can name nothing.
    with pytest.raises(UnavailableError):
        await swept.context.db.write(
            "test.step", lambda connection: blobs_repo.make_live(connection, [name])
        )


async def test_an_upload_that_breaks_off_leaves_nothing(swept: Store, lying: Lying) -> None:
    async def frames() -> AsyncIterator[files_pb2.UploadFileRequest]:
        yield files_pb2.UploadFileRequest(header=files_pb2.UploadFileHeader(filename="f"))
        for _ in range(12):
            yield files_pb2.UploadFileRequest(data=bytes(1 << 20))

    with pytest.raises(Exception, match="broke off"), our_errors():
        await told(swept.files.UploadFile(frames(), metadata=swept.metadata))
    await swept.context.blobs.close()
    assert lying() == set()
    await sweep(swept)
    assert await rows(swept) == {}


async def test_what_arrives_late_is_deleted_too(
    request: pytest.FixtureRequest, swept: Store, lying: Lying
) -> None:
    """A request whose answer was lost may be done long after its writer gave up."""
    if not swept.context.settings.blobs_url:
        assert swept.context.blobs.late_seconds == 0
        return
    server: S3Server = request.getfixturevalue("bucket")
    name = await intake.announce(swept.context, "default", "part")  # type: ignore[arg-type]
    server.fault(Fault())
    with pytest.raises(UnavailableError):
        await swept.context.blobs.put("test.step", name, b"late")
    server.fault(None)
    intake.give_up(swept.context, [name])
    await asyncio.sleep(0)
    await swept.sweeper.run_once()
    # Only now it arrives, and its row is still there to lead the sweeper to it.
    await swept.context.blobs.put("test.step", name, b"late")
    swept.clock.advance(LATE_SECONDS - 1)
    assert await swept.sweeper.run_once() == 0
    assert await rows(swept) == {name: "doomed"}
    swept.clock.advance(1)
    assert await swept.sweeper.run_once() == 1
    assert lying() == set()


async def test_one_fault_of_the_sweep_keeps_nothing_else(
    swept: Store, lying: Lying, monkeypatch: pytest.MonkeyPatch
) -> None:
    await swept.upload(chat_line("r0"), expires_after=HOUR)
    swept.clock.advance(3600)

    def fails(*_: object) -> bool:
        raise UnavailableError("no")

    monkeypatch.setattr("services.store.files.uploads_repo.expire_one", fails)
    with pytest.raises(ExceptionGroup):
        await sweep(swept)
    assert lying() == set()


# --- holds ----------------------------------------------------------------------------------------


async def hold(store: Store, hold_id: str, until_ms: int) -> None:
    await store.context.db.write(
        "test.step", lambda connection: holds_repo.hold(connection, hold_id, until_ms)
    )


async def test_while_a_hold_stands_no_blob_is_deleted(swept: Store, lying: Lying) -> None:
    file = await swept.upload(chat_line("r0"), expires_after=HOUR)
    assert len(lying()) == 2
    now_ms = swept.context.now_ms()
    await hold(swept, "backup-1", now_ms + 2 * 3_600_000)
    await hold(swept, "backup-2", now_ms + 3 * 3_600_000)
    swept.clock.advance(3600)
    assert await swept.sweeper.run_once() == 0
    assert len(lying()) == 2
    with pytest.raises(NotFoundError):
        await swept.download(file.id)

    await swept.context.db.write(
        "test.step", lambda connection: holds_repo.release(connection, "backup-1")
    )
    assert await swept.sweeper.run_once() == 0
    # The second lapses by itself: a backup that died blocks nothing for ever.
    swept.clock.advance(2 * 3600)
    assert await swept.sweeper.run_once() == 2
    assert lying() == set()
    assert await swept.sql(sweep_holds.select()) == []


async def test_what_was_given_up_is_named_by_no_commit(swept: Store, lying: Lying) -> None:
    """Not even while it is still there: whoever is to delete it may be about to."""
    sent, go_on = asyncio.Event(), asyncio.Event()

    async def frames() -> AsyncIterator[files_pb2.UploadFileRequest]:
        yield files_pb2.UploadFileRequest(header=files_pb2.UploadFileHeader(filename="f"))
        yield files_pb2.UploadFileRequest(data=chat_line("r0"))
        sent.set()
        await go_on.wait()
        yield files_pb2.UploadFileRequest(footer=files_pb2.UploadFileFooter(purpose="batch"))

    slow = asyncio.ensure_future(told(swept.files.UploadFile(frames(), metadata=swept.metadata)))
    await sent.wait()
    await eventually(lambda: rows(swept))
    swept.clock.advance(DAY_SECONDS + 1)
    await hold(swept, "backup", swept.context.now_ms() + 3_600_000)
    await swept.sweeper.run_once()
    assert set((await rows(swept)).values()) == {"doomed"}
    go_on.set()
    with pytest.raises(UnavailableError), our_errors():
        await slow
    await swept.context.db.write(
        "test.step", lambda connection: holds_repo.release(connection, "backup")
    )
    # From its own giving up on, something may arrive late.
    swept.clock.advance(1)
    await sweep(swept)
    assert lying() == set()
    assert await rows(swept) == {}


async def test_a_hold_is_moved_by_taking_it_again(swept: Store) -> None:
    await swept.upload(chat_line("r0"), expires_after=HOUR)
    start_ms = swept.context.now_ms()
    await hold(swept, "backup-1", start_ms + 3_600_000)
    await hold(swept, "backup-1", start_ms + 2 * 3_600_000)
    swept.clock.advance(3600)
    assert await swept.sweeper.run_once() == 0
    swept.clock.advance(3600)
    assert await swept.sweeper.run_once() == 2
