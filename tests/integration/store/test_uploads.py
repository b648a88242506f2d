"""Uploads through the store's gRPC door: parts in any order, one durable file or none."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from protos.nightshift.v1 import batches_pb2, files_pb2, uploads_pb2
from services.kit.wire.errors import InvalidRequestError, NotFoundError
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
from tests.kit.uploads import add, cancel, complete, create, cut, upload_in_parts

pytestmark = pytest.mark.slow

LINES = [chat_line(f"r{number}", "é\u2028" * 40) for number in range(30)]
CONTENT = b"".join(LINES)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with store_process(tmp_path_factory.mktemp("store")) as process:
        yield process


@pytest.fixture
async def client(store: StoreProcess) -> AsyncIterator[Client]:
    async with client_of(store) as client:
        yield client


async def blobs_are(client: Client, names: list[Path]) -> None:
    await eventually(lambda: client.store.blobs() == names)


# contract: 92
async def test_content_follows_the_order_of_completion(client: Client) -> None:
    before = len(client.store.blobs())
    pieces = cut(CONTENT, 6)
    upload = await create(client, len(CONTENT), filename="nächste schicht.txt")
    assert upload.id.startswith("upload_")
    assert (upload.bytes, upload.purpose) == (len(CONTENT), "batch")
    assert upload.status == uploads_pb2.UPLOAD_STATUS_PENDING
    assert not upload.HasField("file")
    sent = await asyncio.gather(*(add(client, upload.id, piece) for piece in pieces[::-1]))

    done = await complete(client, upload.id, sent[::-1])

    assert done.status == uploads_pb2.UPLOAD_STATUS_COMPLETED
    file = done.file
    assert file.id.startswith("file-")
    assert (file.bytes, file.filename) == (len(CONTENT), "nächste schicht.txt")
    assert (file.purpose, file.status) == ("batch", "processed")
    assert file.expires_at - file.created_at == 2_592_000
    assert await client.download(file.id) == CONTENT
    # The parts as they came and one index: nothing was written a second time.
    await eventually(lambda: len(client.store.blobs()) == before + len(pieces) + 1)

    await client.files.DeleteFile(
        files_pb2.DeleteFileRequest(file_id=file.id), metadata=client.metadata
    )
    await eventually(lambda: len(client.store.blobs()) == before)
    gone = await complete(client, upload.id, sent[::-1])
    assert gone.status == uploads_pb2.UPLOAD_STATUS_COMPLETED
    assert not gone.HasField("file")


async def test_a_batch_runs_on_parts_cut_anywhere(client: Client) -> None:
    content = b"\xef\xbb\xbf" + b"\r\n \r\n".join(line.rstrip() for line in LINES)
    pieces = cut(content, 40, seed=3)
    file = await upload_in_parts(client, pieces)
    batch = await client.create(file.id)
    running = await client.settled(batch.id, batches_pb2.BATCH_STATUS_IN_PROGRESS)
    assert running.request_counts.total == len(LINES)


@pytest.mark.parametrize("count", [2, 9, 60])
async def test_faults_are_those_of_a_file_that_came_whole(client: Client, count: int) -> None:
    lines = [
        chat_line("a"),
        b'{"custom_id":\n',
        chat_line("b", stream=True),
        b"\r\n",
        chat_line("a", "again"),
        chat_line("c").replace(b"/v1/chat/completions", b"/v1/embeddings"),
        b'{"custom_id":"caf\xe9"}\n',
        chat_line("d").replace(b"simulated", b"unknown-model"),
        b"[1]\n",
        chat_line("b").rstrip(),
    ]
    content = b"".join(lines)
    file = await upload_in_parts(client, cut(content, count, seed=count), seed=count)
    in_parts, whole = [
        await client.settled(batch.id, batches_pb2.BATCH_STATUS_FAILED)
        for batch in (
            await client.create(file.id),
            await client.create((await client.upload(content)).id),
        )
    ]
    assert len(whole.errors) >= 8
    assert list(in_parts.errors) == list(whole.errors)


async def test_more_names_than_a_parts_index_holds(client: Client) -> None:
    """The content itself is indexed then: each line's fault is found all the same."""
    url = "/v1/chat/completions"
    lines = [chat_line(f"r{n}").replace(url.encode(), b"%0500d" % n) for n in range(2200)]
    content = b"".join([*lines, chat_line("last")])
    file = await upload_in_parts(client, [content[:10], content[10:]])
    batch = await client.create(file.id)
    failed = await client.settled(batch.id, batches_pb2.BATCH_STATUS_FAILED)
    assert (failed.errors[0].code, failed.errors[0].line) == ("invalid_url", 1)


# contract: 93
async def test_sizes_and_md5_are_checked_and_leave_the_upload_pending(client: Client) -> None:
    one, two = cut(CONTENT, 2)
    upload = await create(client, len(CONTENT))
    ids = [await add(client, upload.id, one), await add(client, upload.id, two)]
    md5 = hashlib.md5(CONTENT).hexdigest()

    for part_ids, sum_ in ((ids[:1], len(one)), ([], 0)):
        with pytest.raises(InvalidRequestError, match=str(sum_)) as error:
            await complete(client, upload.id, part_ids)
        assert refused(error) == (400, None, "part_ids")
    with pytest.raises(InvalidRequestError, match=md5) as error:
        await complete(client, upload.id, ids, "0" * 32)
    assert refused(error) == (400, None, "md5")
    with pytest.raises(InvalidRequestError, match="order") as error:
        await complete(client, upload.id, ids[::-1], md5)
    assert refused(error) == (400, None, "md5")
    with pytest.raises(InvalidRequestError, match="32 hex") as error:
        await complete(client, upload.id, ids, "no md5")
    assert refused(error) == (400, "invalid_value", "md5")

    done = await complete(client, upload.id, ids, md5.upper())
    assert await client.download(done.file.id) == CONTENT


async def test_parts_that_are_none_are_refused(client: Client) -> None:
    upload, other = [await create(client, 8, purpose="user_data") for _ in range(2)]
    mine, foreign = await add(client, upload.id, b"half"), await add(client, other.id, b"half")
    for part_ids in ([mine, foreign], [mine, mine], [mine, "part_none"], [mine, ""]):
        with pytest.raises(InvalidRequestError) as error:
            await complete(client, upload.id, part_ids)
        assert refused(error) == (400, None, "part_ids")
    again = await add(client, upload.id, b"HALF")
    assert await client.download((await complete(client, upload.id, [again, mine])).file.id) == (
        b"HALFhalf"
    )


async def test_parts_not_listed_are_dropped(client: Client) -> None:
    before = len(client.store.blobs())
    upload = await create(client, len(LINES[0]))
    # The second stands for one whose answer was lost, so that the client sent it again.
    kept, _ = [await add(client, upload.id, LINES[0]) for _ in range(2)]
    assert len(client.store.blobs()) == before + 4
    done = await complete(client, upload.id, [kept])
    await eventually(lambda: len(client.store.blobs()) == before + 2)
    assert await client.download(done.file.id) == LINES[0]


async def test_completing_again_answers_the_same_and_nothing_else(client: Client) -> None:
    one, two = cut(CONTENT, 2)
    upload = await create(client, len(CONTENT))
    ids = [await add(client, upload.id, one), await add(client, upload.id, two)]
    md5 = hashlib.md5(CONTENT).hexdigest()

    racing = await asyncio.gather(*(complete(client, upload.id, ids, md5) for _ in range(5)))

    assert all(done == racing[0] for done in racing)
    assert await complete(client, upload.id, ids, md5) == racing[0]
    for part_ids, other_md5 in ((ids, None), (ids[::-1], md5), (ids[:1], md5)):
        with pytest.raises(InvalidRequestError, match="completed") as error:
            await complete(client, upload.id, part_ids, other_md5)
        assert refused(error) == (400, None, "upload_id")
    assert await client.download(racing[0].file.id) == CONTENT


async def test_of_two_different_completions_one_wins(client: Client) -> None:
    upload = await create(client, 8, purpose="user_data")
    ids = [await add(client, upload.id, b"half"), await add(client, upload.id, b"HALF")]
    outcomes = await asyncio.gather(
        complete(client, upload.id, ids),
        complete(client, upload.id, ids[::-1]),
        cancel(client, upload.id),
        return_exceptions=True,
    )
    won = [one for one in outcomes if not isinstance(one, BaseException)]
    assert len(won) == 1
    assert all(isinstance(one, InvalidRequestError) for one in outcomes if one is not won[0])


# contract: 94
async def test_an_ended_upload_takes_nothing(client: Client) -> None:
    before = client.store.blobs()
    cancelled = await create(client, 8, purpose="user_data")
    part = await add(client, cancelled.id, b"12345678")
    answer = await cancel(client, cancelled.id)
    assert answer.status == uploads_pb2.UPLOAD_STATUS_CANCELLED
    await blobs_are(client, before)
    completed = await create(client, 0, purpose="user_data")
    await complete(client, completed.id, [])
    for upload_id, status in ((cancelled.id, "cancelled"), (completed.id, "completed")):
        calls = [add(client, upload_id, b""), cancel(client, upload_id)]
        if upload_id == cancelled.id:
            calls.append(complete(client, upload_id, [part]))
        for call in calls:
            with pytest.raises(InvalidRequestError, match=status) as error:
                await call
            assert refused(error) == (400, None, "upload_id")
    await blobs_are(client, before)


async def test_unknown_uploads_and_those_of_others_are_not_found(client: Client) -> None:
    upload = await create(client, 4, purpose="user_data")
    part = await add(client, upload.id, b"mine")
    other = Client(client.store, project_id="other")
    for who, upload_id in ((client, "upload_none"), (other, upload.id)):
        for call in (
            add(who, upload_id, b"x"),
            complete(who, upload_id, [part]),
            cancel(who, upload_id),
        ):
            with pytest.raises(NotFoundError, match=f"No such Upload object: {upload_id}") as error:
                await call
            assert refused(error) == (404, None, "upload_id")
    await other.channel.close()
    assert (await complete(client, upload.id, [part])).file.bytes == 4


async def test_what_is_created_must_fit(client: Client) -> None:
    limit = 200 * 1024 * 1024
    for size, purpose, code, param in (
        (-1, "batch", "integer_below_min_value", "bytes"),
        (limit + 1, "batch", "integer_above_max_value", "bytes"),
        ((8 << 30) + 1, "user_data", "integer_above_max_value", "bytes"),
        (1, "bogus", None, "purpose"),
        (1, "batch_output", None, "purpose"),
    ):
        with pytest.raises(InvalidRequestError) as error:
            await create(client, size, purpose=purpose)
        assert refused(error) == (400, code, param)
    with pytest.raises(InvalidRequestError) as error:
        await create(client, 1, filename="")
    assert refused(error) == (400, None, "filename")
    with pytest.raises(InvalidRequestError) as error, our_errors():
        await client.uploads.CreateUpload(
            uploads_pb2.CreateUploadRequest(filename="f", purpose="batch"),
            metadata=client.metadata,
        )
    assert refused(error) == (400, "missing_required_parameter", "bytes")
    expiry = files_pb2.ExpiresAfter(anchor="created_at", seconds=3599)
    with pytest.raises(InvalidRequestError) as error:
        await create(client, 1, expires_after=expiry)
    assert refused(error) == (400, "integer_below_min_value", "expires_after.seconds")
    assert (await create(client, limit)).bytes == limit
    assert (await create(client, 8 << 30, purpose="user_data")).bytes == 8 << 30


async def test_more_than_declared_is_refused_while_it_comes(client: Client) -> None:
    before = client.store.blobs()
    upload = await create(client, 10, purpose="user_data")
    with pytest.raises(InvalidRequestError, match="10 bytes") as error:
        await add(client, upload.id, b"x" * 11)
    assert refused(error) == (400, None, "data")
    await blobs_are(client, before)
    first = await add(client, upload.id, b"123456")
    with pytest.raises(InvalidRequestError, match="10 bytes") as error:
        await add(client, upload.id, b"abcde")
    assert refused(error) == (400, None, "data")
    # Sent again because its answer was lost.
    assert await add(client, upload.id, b"123456") != first
    rest = await add(client, upload.id, b"7890")
    assert (await complete(client, upload.id, [first, rest])).file.bytes == 10


async def test_a_part_has_its_own_limit(client: Client) -> None:
    upload = await create(client, 200 << 20, purpose="user_data")
    with pytest.raises(InvalidRequestError, match="67108864") as error:
        await add(client, upload.id, bytes((64 << 20) + 1))
    assert refused(error) == (400, None, "data")


async def test_all_parts_together_have_a_limit(tmp_path: Path) -> None:
    limits = {"NIGHTSHIFT_STORE_MAX_UPLOAD_BYTES": "10"}
    async with running_store(tmp_path / "data", limits) as client:
        with pytest.raises(InvalidRequestError):
            await create(client, 11, purpose="user_data")
        upload = await create(client, 10, purpose="user_data")
        first = await add(client, upload.id, b"12345")
        await add(client, upload.id, b"12345")
        # Repeats are not counted against the declared size, but against this.
        with pytest.raises(InvalidRequestError, match="10 bytes in all") as error:
            await add(client, upload.id, b"12345")
        assert refused(error) == (400, None, "data")
        assert first


@pytest.mark.parametrize(
    "content", [b"\n \r\n", b"[]\n", b"a,b\n1,2\n", b"\xff\xfe{\x00", b'\n{"a":1,}\n', b"42"]
)
async def test_a_batch_input_without_a_request_is_refused(client: Client, content: bytes) -> None:
    upload = await create(client, len(content))
    ids = [await add(client, upload.id, piece) for piece in cut(content, 2)]
    with pytest.raises(InvalidRequestError) as whole:
        await client.upload(content)
    with pytest.raises(InvalidRequestError, match="Invalid file") as error:
        await complete(client, upload.id, ids)
    assert error.value.message == whole.value.message
    assert refused(error) == refused(whole)
    assert (await cancel(client, upload.id)).status == uploads_pb2.UPLOAD_STATUS_CANCELLED


async def test_an_empty_upload_is_an_empty_file(client: Client) -> None:
    upload = await create(client, 0, purpose="user_data")
    file = (await complete(client, upload.id, [])).file
    assert file.bytes == 0
    assert await client.download(file.id) == b""
    assert not file.HasField("expires_at")
    batch = await create(client, 0)
    with pytest.raises(InvalidRequestError, match="empty"):
        await complete(client, batch.id, [])
    around = await create(client, len(CONTENT))
    ids = [await add(client, around.id, piece) for piece in (b"", CONTENT, b"")]
    assert await client.download((await complete(client, around.id, ids)).file.id) == CONTENT


async def test_a_part_that_breaks_off_leaves_nothing(client: Client) -> None:
    before = client.store.blobs()
    upload = await create(client, len(LINES[0]))
    header = uploads_pb2.UploadPartHeader(upload_id=upload.id)
    frames = [
        uploads_pb2.AddUploadPartRequest(header=header),
        uploads_pb2.AddUploadPartRequest(data=LINES[0]),
    ]
    with pytest.raises(InvalidRequestError, match="broke off"), our_errors():
        await told(client.uploads.AddUploadPart(iter(frames), metadata=client.metadata))
    await blobs_are(client, before)
    with pytest.raises(InvalidRequestError, match="header"), our_errors():
        await told(client.uploads.AddUploadPart(iter(frames[1:]), metadata=client.metadata))

    async def waiting() -> AsyncIterator[uploads_pb2.AddUploadPartRequest]:
        for frame in frames:
            yield frame
        await asyncio.Event().wait()

    call = client.uploads.AddUploadPart(waiting(), metadata=client.metadata)
    await eventually(lambda: len(client.store.blobs()) == len(before) + 1)
    call.cancel()
    await blobs_are(client, before)
    assert (await complete(client, upload.id, [await add(client, upload.id, LINES[0])])).file.bytes


async def test_parts_outlive_a_killed_store(tmp_path: Path) -> None:
    one, two = cut(CONTENT, 2)
    async with running_store(tmp_path / "data") as client:
        upload = await create(client, len(CONTENT))
        first = await add(client, upload.id, one)
        client.store.kill()
        client.store.start()
        await client.ready()
        second = await add(client, upload.id, two)
        client.store.kill()
        client.store.start()
        await client.ready()

        done = await complete(client, upload.id, [first, second])
        client.store.kill()
        client.store.start()
        await client.ready()

        assert await complete(client, upload.id, [first, second]) == done
        assert await client.download(done.file.id) == CONTENT
        batch = await client.create(done.file.id)
        running = await client.settled(batch.id, batches_pb2.BATCH_STATUS_IN_PROGRESS)
        assert running.request_counts.total == len(LINES)
