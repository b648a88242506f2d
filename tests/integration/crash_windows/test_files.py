"""A store dies, or stands still, at each step of taking files in and letting them go."""

import contextlib
from pathlib import Path

import pytest

from protos.nightshift.v1 import files_pb2
from services.kit.wire.errors import InvalidRequestError, NotFoundError
from tests.integration.crash_windows.backings import migrated_database, postgres, shared
from tests.integration.crash_windows.stories import Stories
from tests.integration.crash_windows.world import Asker, Backing, Check, World
from tests.kit import uploads
from tests.kit.store import chat_line, our_errors
from tests.kit.template import Template, template

__all__ = ["migrated_database", "postgres", "shared", "template"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

stories = Stories()
CONTENT = b"".join(chat_line(f"r{number}") for number in range(20))


async def files_of(asker: Asker) -> list[str]:
    with our_errors():
        answer = await asker.files.ListFiles(files_pb2.ListFilesRequest(), metadata=asker.metadata)
    return [file.id for file in answer.files]


@stories.windows("blob.announce", "file.write", "file.index_write", "file.create")
async def upload(world: World) -> Check:
    """However often it has to be sent, one key makes one file."""
    await world.start()
    await world.arm()
    file = await world.do(lambda asker: asker.upload(CONTENT), key="k")

    async def check() -> None:
        assert await world.do(files_of) == [file.id]
        again = await world.do(lambda asker: asker.upload(CONTENT), key="k")
        assert again.id == file.id
        assert await world.do(lambda asker: asker.download(file.id)) == CONTENT

    return check


@stories.windows("blob.give_up")
async def upload_that_breaks_off(world: World) -> Check:
    """What was refused half-way leaves nothing."""
    await world.start()
    await world.arm()

    async def refused(asker: Asker) -> None:
        with pytest.raises(InvalidRequestError):
            await asker.upload(b"this is no JSON\n")

    # The store gives blobs up behind its answer, so that nobody notices its end by a call.
    while not world.reached:
        await world.do(refused)

    async def check() -> None:
        assert await world.do(files_of) == []

    return check


@stories.windows("file.delete", "sweep.purge_file", "sweep.delete_blob", "sweep.forget_blobs")
async def delete(world: World) -> Check:
    """A deleted file is gone at once, and its bytes soon after."""
    await world.start()
    kept = await world.created(lambda asker: asker.upload(CONTENT))
    file = await world.created(lambda asker: asker.upload(CONTENT))
    await world.arm()

    async def gone(asker: Asker) -> None:
        request = files_pb2.DeleteFileRequest(file_id=file.id)
        # Where the answer was lost, it is gone by now.
        with contextlib.suppress(NotFoundError), our_errors():
            await asker.files.DeleteFile(request, metadata=asker.metadata)

    await world.do(gone)
    await world.until(lambda: world.reached)
    await world.until(lambda: len(world.blobs()) == 2)

    async def check() -> None:
        assert await world.do(files_of) == [kept.id]
        assert await world.do(lambda asker: asker.download(kept.id)) == CONTENT
        assert len(world.blobs()) == 2

    return check


@stories.windows(
    "upload.create", "part.write", "part.index_write", "part.add", "upload.index_write",
    "upload.complete",
)  # fmt: skip
async def upload_in_parts(world: World) -> Check:
    """Parts may come twice; the file has each of them once."""
    await world.start()
    await world.arm()
    upload = await world.do(lambda asker: uploads.create(asker, len(CONTENT)))
    middle = len(CONTENT) // 2
    first = await world.do(lambda asker: uploads.add(asker, upload.id, CONTENT[:middle]))
    second = await world.do(lambda asker: uploads.add(asker, upload.id, CONTENT[middle:]))
    done = await world.do(lambda asker: uploads.complete(asker, upload.id, [first, second]))

    async def check() -> None:
        again = await world.do(lambda asker: uploads.complete(asker, upload.id, [first, second]))
        assert again.file.id == done.file.id
        assert await world.do(files_of) == [done.file.id]
        assert await world.do(lambda asker: asker.download(done.file.id)) == CONTENT

    return check


@stories.windows("upload.cancel")
async def cancelled_upload(world: World) -> Check:
    """What was cancelled takes no more parts, and keeps none."""
    await world.start()
    upload = await world.do(lambda asker: uploads.create(asker, len(CONTENT)))
    part = await world.do(lambda asker: uploads.add(asker, upload.id, CONTENT))
    await world.arm()

    async def cancelled(asker: Asker) -> None:
        # Where the answer was lost, it is cancelled by now; `check` tells whether it is.
        with contextlib.suppress(InvalidRequestError):
            await uploads.cancel(asker, upload.id)

    await world.do(cancelled)

    async def check() -> None:
        for late in (
            lambda asker: uploads.add(asker, upload.id, CONTENT),
            lambda asker: uploads.complete(asker, upload.id, [part]),
        ):
            with pytest.raises(InvalidRequestError, match="is cancelled"):
                await world.do(late)
        await world.until(lambda: not world.blobs())

    return check


@stories.windows(
    "sweep.doom_abandoned", "sweep.expire_upload", "sweep.forget_keys", "sweep.purge_deliveries"
)
async def what_has_grown_old(world: World) -> Check:
    """An upload past its time goes with its parts, a key past its day may be used again."""
    await world.start()
    upload = await world.do(lambda asker: uploads.create(asker, len(CONTENT)))
    await world.do(lambda asker: uploads.add(asker, upload.id, CONTENT))
    file = await world.do(lambda asker: asker.upload(CONTENT), key="k")
    await world.arm(
        lambda: world.sql(
            "UPDATE uploads SET expires_at = 1",
            "UPDATE idempotency_keys SET created_ms = 1",
            "INSERT INTO blobs (name, project_id, state, created_ms)"
            " VALUES ('default/file/0', 'default', 'pending', 1)",
        )
    )
    await world.until(lambda: world.reached)
    await world.until(lambda: len(world.blobs()) == 2)

    async def check() -> None:
        assert await world.do(files_of) == [file.id]
        with pytest.raises(InvalidRequestError, match="is expired"):
            await world.do(lambda asker: uploads.add(asker, upload.id, CONTENT))

    return check


@pytest.mark.parametrize("name", stories.names())
async def test_killed(name: str, template: Template, tmp_path: Path) -> None:
    await stories.killed(name, template, tmp_path)


@pytest.mark.parametrize("name", stories.names())
async def test_frozen(name: str, template: Template, tmp_path: Path, shared: Backing) -> None:
    await stories.frozen(name, template, tmp_path, shared)
