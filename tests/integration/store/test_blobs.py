"""What every place for blobs promises: the directory, and a bucket over HTTP."""

import asyncio
import errno
import hashlib
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.kit.process import failpoints
from services.kit.process.settings import SettingsError
from services.kit.wire.errors import UnavailableError
from services.store.blobs import local
from services.store.blobs.base import BlobMissingError, Blobs, BlobUnreadableError
from services.store.blobs.reader import BlobReader, blob_reader
from services.store.blobs.s3.blobs import PART_BYTES
from services.store.blobs.where_kept import open_blobs
from services.store.settings import StoreSettings
from tests.integration.store.places import MIB, at_server, bucket, new_name, pieces
from tests.kit.s3_server import BUCKET, PREFIX

__all__ = ["bucket"]

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@dataclass
class Place:
    """A place for blobs, and what can be seen of it from outside."""

    blobs: Blobs
    reader: BlobReader
    settings: StoreSettings

    def names(self) -> dict[str, int]:
        return dict(self.reader.names())


@pytest.fixture(params=["bucket", "directory"])
async def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Place]:
    settings = StoreSettings(data_dir=tmp_path / "data")
    if request.param == "bucket":
        settings = at_server(request.getfixturevalue("bucket"), monkeypatch)
    opened = Place(open_blobs(settings), blob_reader(settings), settings)
    yield opened
    await opened.blobs.close()


@pytest.mark.parametrize(
    "size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, 3 * PART_BYTES + 7]
)
async def test_what_is_written_is_read_whole_and_in_ranges(place: Place, size: int) -> None:
    content = os.urandom(size)
    whole, streamed = new_name(), new_name()
    assert await place.blobs.put("test.step", whole, content) == size
    assert await place.blobs.put("test.step", streamed, pieces(content, 700_001)) == size
    assert place.names() == {whole: size, streamed: size}
    for name in (whole, streamed):
        read = await place.blobs.read(name, 0, size + 1)
        assert type(read) is bytes
        assert hashlib.sha256(read).digest() == hashlib.sha256(content).digest()
        middle = size // 2
        assert await place.blobs.read(name, middle, 100) == content[middle : middle + 100]
        # Past the end there is nothing, which is not the same as no blob.
        assert await place.blobs.read(name, size, 10) == b""
        assert await place.blobs.read(name, size + 5, 10) == b""
        assert await place.blobs.read(name, 0, 0) == b""
        assert place.reader.size(name) == size
        assert place.reader.read(name, middle, 100) == content[middle : middle + 100]


async def test_a_blob_that_is_not_there(place: Place) -> None:
    name = new_name()
    with pytest.raises(BlobMissingError):
        await place.blobs.read(name, 0, 10)
    with pytest.raises(BlobMissingError):
        place.reader.read(name, 0, 10)
    assert place.reader.size(name) is None
    await place.blobs.delete("test.step", name)


async def test_many_are_deleted_at_once_and_again(place: Place) -> None:
    names = [new_name() for _ in range(20)]
    for name in names:
        await place.blobs.put("test.step", name, b"x")
    await place.blobs.delete("test.step", *names[:15], new_name())
    assert place.names() == dict.fromkeys(names[15:], 1)
    await place.blobs.delete("test.step", *names)
    await place.blobs.delete("test.step")
    assert place.names() == {}


@pytest.mark.parametrize("before", [0, MIB, 3 * PART_BYTES])
async def test_content_that_fails_leaves_nothing(place: Place, before: int) -> None:
    async def failing() -> AsyncIterator[memoryview]:
        async for piece in pieces(os.urandom(before)):
            yield piece
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await place.blobs.put("test.step", new_name(), failing())
    await place.blobs.close()
    assert place.names() == {}
    assert place.reader.unfinished() == 0


async def test_a_put_that_is_cancelled_leaves_nothing(
    place: Place, request: pytest.FixtureRequest
) -> None:
    waits = asyncio.Event()

    async def endless() -> AsyncIterator[memoryview]:
        async for piece in pieces(os.urandom(3 * PART_BYTES)):
            yield piece
        waits.set()
        await asyncio.Event().wait()

    put = asyncio.create_task(place.blobs.put("test.step", new_name(), endless()))
    await waits.wait()
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    await place.blobs.close()
    assert place.names() == {}
    assert place.reader.unfinished() == 0
    if place.settings.blobs_url:
        assert request.getfixturevalue("bucket").unfinished() == []


async def test_both_places_pass_the_failpoints(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[str] = []
    monkeypatch.setattr(failpoints, "before", lambda step: passed.append(f"{step}:before"))
    monkeypatch.setattr(failpoints, "after", lambda step: passed.append(f"{step}:after"))
    name = new_name()
    await place.blobs.put("test.put", name, b"x")
    await place.blobs.delete("test.delete", name)
    assert passed == [
        "test.put:before",
        "test.put:after",
        "test.delete:before",
        "test.delete:after",
    ]


def test_no_place_writes_or_deletes_past_the_failpoints() -> None:
    from services.store.blobs.s3.blobs import S3Blobs

    for kind in (local.LocalBlobs, S3Blobs):
        assert issubclass(kind, Blobs)
        assert not {"put", "delete"} & set(vars(kind)), "those of `Blobs` pass the failpoints"


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOMEM, errno.ESTALE])
async def test_a_file_that_is_refused_is_told_from_a_disk_that_gives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    blobs = open_blobs(StoreSettings(data_dir=tmp_path))
    name = new_name()
    await blobs.put("test.step", name, b"x")

    def refuse(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", refuse)
        with pytest.raises(UnavailableError) as refused:
            await blobs.read(name, 0, 1)
    of_file = number in {errno.EIO, errno.EACCES}
    assert isinstance(refused.value, BlobUnreadableError) == of_file
    assert await blobs.read(name, 0, 1) == b"x"


async def test_a_directory_that_is_away_is_told(tmp_path: Path) -> None:
    blobs = open_blobs(StoreSettings(data_dir=tmp_path))
    await blobs.look()
    (tmp_path / "blobs").rename(tmp_path / "away")
    with pytest.raises(UnavailableError, match="mounted"):
        await blobs.look()
    (tmp_path / "away").rename(tmp_path / "blobs")
    await blobs.look()


# --- a shared directory ---------------------------------------------------------------------------


async def test_who_starts_leaves_what_others_are_writing(tmp_path: Path) -> None:
    settings = StoreSettings(data_dir=tmp_path)
    one = open_blobs(settings)
    (tmp_path / "blobs" / "tmp" / "of-the-dead").write_bytes(b"half")
    name, content = new_name(), os.urandom(MIB)
    half, go_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[memoryview]:
        yield memoryview(content)[:1000]
        half.set()
        await go_on.wait()
        yield memoryview(content)[1000:]

    put = asyncio.create_task(one.put("test.step", name, slowly()))
    await half.wait()
    reader = blob_reader(settings)
    assert reader.unfinished() == 2
    other = open_blobs(settings)
    assert reader.unfinished() == 1
    go_on.set()
    await put
    assert await other.read(name, 0, 2 * MIB) == content
    assert reader.unfinished() == 0


@pytest.mark.parametrize("whole", [True, False])
async def test_who_is_cancelled_while_the_disk_is_slow_finds_nothing_there_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """The thread that syncs cannot be stopped; it must not name the blob after all."""
    settings = StoreSettings(data_dir=tmp_path)
    blobs = open_blobs(settings)
    syncing, go_on, done = threading.Event(), threading.Event(), threading.Event()
    sync, rename = os.fsync, Path.rename

    def slowly(descriptor: int) -> None:
        syncing.set()
        go_on.wait(20)
        sync(descriptor)

    def noted(path: Path, target: Path) -> Path:
        renamed.append(target)
        return rename(path, target)

    renamed: list[Path] = []
    monkeypatch.setattr(os, "fsync", slowly)
    monkeypatch.setattr(Path, "rename", noted)
    closed = local._Unfinished._drop

    def dropped(self: local._Unfinished) -> None:
        closed(self)
        done.set()

    monkeypatch.setattr(local._Unfinished, "_drop", dropped)
    put = asyncio.create_task(
        blobs.put("test.step", new_name(), b"x" if whole else pieces(b"x" * MIB))
    )
    await asyncio.to_thread(syncing.wait, 20)
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    go_on.set()
    assert await asyncio.to_thread(done.wait, 20)
    assert renamed == []
    reader = blob_reader(settings)
    assert (dict(reader.names()), reader.unfinished()) == ({}, 0)


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        f"http://{BUCKET}",
        "relative",
        "s3://key:secret@b",
        f"s3://b/{PREFIX}?x=1",
        "s3://b/../c",
        "s3://b/c//d",
    ],
)
def test_a_setting_that_names_no_place_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SettingsError, match="NIGHTSHIFT_STORE_BLOBS_URL must be") as error:
        open_blobs(StoreSettings(blobs_url=url))
    assert "secret" not in str(error.value)
