"""Files through the store's gRPC door: durable and indexed, or not there at all."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from protos.nightshift.v1 import batches_pb2, common_pb2, files_pb2
from services.kit.calls import rpc
from services.kit.wire.errors import InvalidRequestError, NotFoundError, TooLargeError
from tests.kit.eventually import eventually
from tests.kit.store import (
    Client,
    StoreProcess,
    chat_line,
    client_of,
    our_errors,
    refused,
    running_store,
    store_process,
)
from tests.kit.streams import told

LIMITS = {
    "NIGHTSHIFT_STORE_MAX_FILE_BYTES": "8000",
    "NIGHTSHIFT_STORE_MAX_BATCH_FILE_BYTES": "4000",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with store_process(tmp_path_factory.mktemp("store")) as process:
        yield process


@pytest.fixture
async def client(store: StoreProcess) -> AsyncIterator[Client]:
    async with client_of(store) as client:
        yield client


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Client]:
    async with running_store(tmp_path / "data", LIMITS) as client:
        yield client


@pytest.fixture
async def before(client: Client) -> tuple[list[str], list[Path]]:
    """What was there before the test, to compare with afterwards."""
    return await listed(client), client.store.blobs()


Before = tuple[list[str], list[Path]]


async def listed(client: Client, **request: object) -> list[str]:
    answer = await client.files.ListFiles(
        files_pb2.ListFilesRequest(**request), metadata=client.metadata
    )
    return [file.id for file in answer.files]


@pytest.mark.parametrize("frame_bytes", [7, 1000, 1 << 20])
async def test_content_comes_back_byte_for_byte(client: Client, frame_bytes: int) -> None:
    content = b"".join(chat_line(f"r{number}", "é\u2028" * 40) for number in range(30))

    file = await client.upload(content, filename="nächste schicht.txt", frame_bytes=frame_bytes)

    assert file.bytes == len(content)
    assert file.filename == "nächste schicht.txt"
    assert (file.purpose, file.status) == ("batch", "processed")
    assert file.expires_at - file.created_at == 2_592_000
    assert await client.download(file.id) == content


async def test_ranges_are_cut_from_the_content(client: Client) -> None:
    content = chat_line("r1", "x" * 3000)
    file = await client.upload(content)

    for offset, length in [(0, 10), (5, 0), (len(content) - 3, 99), (7, 0)]:
        answers = client.files.ReadFile(
            files_pb2.ReadFileRequest(file_id=file.id, offset=offset, length=length),
            metadata=client.metadata,
        )
        frames = [answer async for answer in answers]
        assert frames[0].file == file
        assert b"".join(frame.data for frame in frames) == content[offset : offset + length]


@pytest.mark.parametrize(
    ("span", "param", "status"),
    [
        ({"offset": -5}, "offset", 400),
        ({"offset": 0, "length": -1}, "length", 400),
        ({"offset": 1 << 20}, "offset", 416),
        ({"offset": 1 << 20, "length": 3}, "offset", 416),
    ],
)
async def test_a_range_outside_of_the_file_is_refused(
    client: Client, span: dict[str, int], param: str, status: int
) -> None:
    file = await client.upload(chat_line("r1"))
    answers = client.files.ReadFile(
        files_pb2.ReadFileRequest(file_id=file.id, **span), metadata=client.metadata
    )
    with pytest.raises(InvalidRequestError) as error, our_errors():
        _ = [answer async for answer in answers]
    assert (error.value.http_status, error.value.param) == (status, param)


@pytest.mark.parametrize(
    ("purpose", "param"), [(None, None), ("bogus", "purpose"), ("batch_output", "purpose")]
)
async def test_a_purpose_that_is_none_is_refused(
    client: Client, before: Before, purpose: str | None, param: str | None
) -> None:
    with pytest.raises(InvalidRequestError) as error:
        await client.upload(chat_line("r1"), purpose=purpose)

    assert refused(error) == (400, None, param)
    await nothing_is_left(client, before)


async def nothing_is_left(client: Client, before: Before) -> None:
    assert await listed(client) == before[0]
    await eventually(lambda: client.store.blobs() == before[1])


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"[]\n", b"a,b\n1,2\n", b"\xff\xfe{\x00"])
async def test_a_batch_input_without_a_request_is_refused(
    client: Client, before: Before, content: bytes
) -> None:
    with pytest.raises(InvalidRequestError, match="Invalid file") as error:
        await client.upload(content)

    assert error.value.http_status == 400
    await nothing_is_left(client, before)
    assert (await client.upload(content, purpose="user_data")).bytes == len(content)


async def test_an_upload_that_breaks_off_leaves_nothing(client: Client, before: Before) -> None:
    received = asyncio.Event()

    async def frames() -> AsyncIterator[files_pb2.UploadFileRequest]:
        yield files_pb2.UploadFileRequest(header=files_pb2.UploadFileHeader(filename="f"))
        yield files_pb2.UploadFileRequest(data=chat_line("r1"))
        received.set()
        await asyncio.Event().wait()

    call = client.files.UploadFile(frames(), metadata=client.metadata)
    await received.wait()
    await eventually(lambda: len(client.store.blobs()) == len(before[1]) + 1)
    call.cancel()
    await nothing_is_left(client, before)

    ended = iter(
        [
            files_pb2.UploadFileRequest(header=files_pb2.UploadFileHeader(filename="f")),
            files_pb2.UploadFileRequest(data=chat_line("r1")),
        ]
    )
    with pytest.raises(InvalidRequestError, match="broke off"), our_errors():
        await told(client.files.UploadFile(ended, metadata=client.metadata))
    await nothing_is_left(client, before)


async def test_a_store_killed_during_an_upload_starts_clean(tmp_path: Path) -> None:
    async with running_store(tmp_path / "data") as client:
        kept = await client.upload(chat_line("kept"))

        async def frames() -> AsyncIterator[files_pb2.UploadFileRequest]:
            yield files_pb2.UploadFileRequest(header=files_pb2.UploadFileHeader(filename="f"))
            yield files_pb2.UploadFileRequest(data=chat_line("lost"))
            await asyncio.Event().wait()

        before = len(client.store.blobs())
        call = client.files.UploadFile(frames(), metadata=client.metadata)
        await eventually(lambda: len(client.store.blobs()) == before + 1)
        client.store.kill()
        call.cancel()
        client.store.start()

        assert await listed(client) == [kept.id]
        assert await client.download(kept.id) == chat_line("kept")
        await eventually(lambda: len(client.store.blobs()) == before)


async def test_a_store_that_is_told_to_stop_takes_an_upload_to_its_end(tmp_path: Path) -> None:
    async with running_store(tmp_path / "data") as client:
        go_on = asyncio.Event()

        async def frames() -> AsyncIterator[files_pb2.UploadFileRequest]:
            yield files_pb2.UploadFileRequest(header=files_pb2.UploadFileHeader(filename="f"))
            yield files_pb2.UploadFileRequest(data=chat_line("first"))
            await go_on.wait()
            yield files_pb2.UploadFileRequest(data=chat_line("last"))
            yield files_pb2.UploadFileRequest(footer=files_pb2.UploadFileFooter(purpose="batch"))

        upload = asyncio.ensure_future(client.files.UploadFile(frames(), metadata=client.metadata))
        await eventually(client.store.blobs)
        stopping = asyncio.create_task(asyncio.to_thread(client.store.stop))
        # It takes nothing new by now.
        async with rpc.open_channel(client.store.address) as other:

            async def refuses() -> bool:
                return not await rpc.is_serving(other)

            await eventually(refuses)
        go_on.set()
        file = (await upload).file
        assert await stopping == 0
        client.store.start()
        assert await listed(client) == [file.id]
        assert await client.download(file.id) == chat_line("first") + chat_line("last")


async def test_limits_hold_whatever_the_header_says(small: Client) -> None:
    with pytest.raises(TooLargeError) as error:
        await small.upload(b"x" * 8001, purpose="user_data")
    assert refused(error) == (413, None, "file")
    with pytest.raises(InvalidRequestError, match="4000") as error:
        await small.upload(chat_line("r1", "x" * 4000))
    assert refused(error) == (400, None, "file")
    await nothing_is_left(small, ([], []))

    assert (await small.upload(b"x" * 8000, purpose="user_data")).bytes == 8000


@pytest.mark.parametrize(
    ("seconds", "code"),
    [(3599, "integer_below_min_value"), (2_592_001, "integer_above_max_value")],
)
async def test_an_expiry_out_of_range_is_refused(client: Client, seconds: int, code: str) -> None:
    expiry = files_pb2.ExpiresAfter(anchor="created_at", seconds=seconds)
    with pytest.raises(InvalidRequestError) as error:
        await client.upload(chat_line("r1"), expires_after=expiry)
    assert refused(error) == (400, code, "expires_after.seconds")
    with pytest.raises(InvalidRequestError) as error:
        await client.upload(
            chat_line("r1"), expires_after=files_pb2.ExpiresAfter(anchor="now", seconds=4000)
        )
    assert refused(error) == (400, "invalid_value", "expires_after.anchor")

    asked = await client.upload(
        chat_line("r1"), expires_after=files_pb2.ExpiresAfter(anchor="created_at", seconds=3600)
    )
    assert asked.expires_at - asked.created_at == 3600
    assert not (await client.upload(b"x", purpose="user_data")).HasField("expires_at")


async def test_pages_lose_and_repeat_nothing_within_a_second(client: Client) -> None:
    earlier = await listed(client, ascending=True)
    made = [(await client.upload(chat_line(f"r{number}"))).id for number in range(7)]

    async def walk(*, ascending: bool) -> list[str]:
        seen: list[str] = []
        while True:
            page = common_pb2.PageRequest(limit=2, after=seen[-1] if seen else "")
            answer = await client.files.ListFiles(
                files_pb2.ListFilesRequest(page=page, ascending=ascending),
                metadata=client.metadata,
            )
            seen += [file.id for file in answer.files]
            if not answer.has_more:
                return seen

    assert await walk(ascending=True) == earlier + made
    assert await walk(ascending=False) == (earlier + made)[::-1]
    await client.files.DeleteFile(
        files_pb2.DeleteFileRequest(file_id=made[3]), metadata=client.metadata
    )
    after_deleted = common_pb2.PageRequest(after=made[3])
    assert await listed(client, page=after_deleted, ascending=True) == made[4:]
    assert not set(made) & set(await listed(client, purpose="user_data"))
    with pytest.raises(NotFoundError), our_errors():
        await listed(client, page=common_pb2.PageRequest(after="file-none"))


async def test_another_project_sees_nothing(client: Client) -> None:
    file = await client.upload(chat_line("r1"))
    batch = await client.create(file.id)
    other = Client(client.store, project_id="other")
    calls = [
        other.files.GetFile(files_pb2.GetFileRequest(file_id=file.id), metadata=other.metadata),
        other.files.DeleteFile(
            files_pb2.DeleteFileRequest(file_id=file.id), metadata=other.metadata
        ),
        other.batches.GetBatch(
            batches_pb2.GetBatchRequest(batch_id=batch.id), metadata=other.metadata
        ),
        other.batches.CancelBatch(
            batches_pb2.CancelBatchRequest(batch_id=batch.id), metadata=other.metadata
        ),
    ]
    for call in calls:
        with pytest.raises(NotFoundError), our_errors():
            await call
    with pytest.raises(NotFoundError):
        await other.download(file.id)
    assert await listed(other) == []
    await other.channel.close()
    assert await client.download(file.id) == chat_line("r1")


async def test_a_deleted_file_goes_once_nothing_runs_on_it(client: Client, before: Before) -> None:
    free, used = await client.upload(chat_line("free")), await client.upload(chat_line("used"))
    batch = await client.create(used.id)
    await client.settled(batch.id, batches_pb2.BATCH_STATUS_IN_PROGRESS)
    for file in (free, used):
        request = files_pb2.DeleteFileRequest(file_id=file.id)
        await client.files.DeleteFile(request, metadata=client.metadata)
        with pytest.raises(NotFoundError) as error, our_errors():
            await client.files.DeleteFile(request, metadata=client.metadata)
        assert refused(error) == (404, None, "id")
        assert file.id in error.value.message

    # Content and index of the file in use stay, until its batch has ended.
    await eventually(lambda: len(client.store.blobs()) == len(before[1]) + 2)
    await client.batches.CancelBatch(
        batches_pb2.CancelBatchRequest(batch_id=batch.id), metadata=client.metadata
    )
    ended = await client.settled(batch.id, batches_pb2.BATCH_STATUS_CANCELLED)
    assert b"batch_cancelled" in await client.download(ended.error_file_id)


async def test_a_second_store_on_the_same_data_refuses_to_start(
    client: Client, tmp_path: Path
) -> None:
    second = StoreProcess(client.store.data)
    second.start()
    assert second.process is not None
    assert second.process.wait(20) == 2
    assert "another store works on" in client.store.log()
    # From a directory of its own, too.
    url = f"sqlite:///{client.store.data / 'nightshift.db'}"
    third = StoreProcess(tmp_path / "third", {"NIGHTSHIFT_STORE_DATABASE_URL": url})
    third.start()
    assert third.process is not None
    assert third.process.wait(20) == 2
    assert f"another store works on {client.store.data / 'nightshift.db'}" in third.log()
    assert (await client.upload(chat_line("r1"))).bytes > 0


async def test_nobody_else_on_the_machine_may_read_what_is_kept(
    client: Client, store: StoreProcess
) -> None:
    await client.upload(chat_line("private"))
    # Its folder is made by the test; what the store puts there is the store's to protect.
    open_to_others = [
        str(path.relative_to(store.data))
        for path in store.data.rglob("*")
        if path.stat().st_mode & 0o077 and path.name != "store.log"
    ]
    assert open_to_others == []


async def test_a_message_that_quotes_an_endless_id_arrives(client: Client) -> None:
    with pytest.raises(NotFoundError) as unknown, our_errors():
        await client.files.GetFile(
            files_pb2.GetFileRequest(file_id="x" * 9_000), metadata=client.metadata
        )
    assert "No such File object" in unknown.value.message
