"""A store whose blobs are in a bucket, as a real process: a batch through it, faults, and kills."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from protos.nightshift.v1 import batches_pb2, files_pb2
from services.kit.calls import rpc
from services.kit.wire.errors import NightshiftError, UnavailableError
from services.store.blobs.s3.blobs import PART_BYTES
from services.store.work.results_repo import INLINE_BYTES
from tests.integration.store_work.worker import Worker
from tests.kit.eventually import eventually
from tests.kit.s3_server import Fault, S3Server, s3_server
from tests.kit.store import START_SECONDS, StoreProcess, chat_line, client_of, our_errors
from tests.kit.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]

MIB = 1024 * 1024
COMPLETED = batches_pb2.BATCH_STATUS_COMPLETED
LINES = 40
ANSWER = "x" * INLINE_BYTES
STOP_SECONDS = 14.0
"""Ten for calls, three for turns of loops; a try at the bucket takes 20 alone."""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@contextlib.asynccontextmanager
async def working(
    data: Path, server: S3Server, *, port: int | None = None, **environment: str
) -> AsyncIterator[Worker]:
    """Run a store on an empty bucket."""
    server.fault(None)
    server.empty()
    store = StoreProcess(data, {**server.environment(port), **environment})
    store.start()
    worker = Worker(store)
    try:
        await worker.ready()
        await worker.register()
        yield worker
    finally:
        await worker.channel.close()
        if store.process is not None and store.process.poll() is None:
            store.stop()


async def ran(store: Worker, lines: int) -> str:
    """Run a batch to its last result; return its id."""
    batch_id = await store.batch(lines)
    (dispatch,) = await store.cut((batch_id, lines))
    token = (await store.open(dispatch)).token
    for line in range(lines):
        assert await store.finish(token, [line], batch_id, answer=ANSWER) == 1
    return batch_id


async def ranged(store: Worker, file_id: str, offset: int, length: int) -> bytes:
    with our_errors():
        answers = store.files.ReadFile(
            files_pb2.ReadFileRequest(file_id=file_id, offset=offset, length=length),
            metadata=store.metadata,
        )
        return b"".join([answer.data async for answer in answers])


async def test_a_batch_from_end_to_end(tmp_path: Path, bucket: S3Server) -> None:
    async with working(tmp_path / "data", bucket) as store:
        content = b"".join(chat_line(f"r{line}", "y" * MIB) for line in range(LINES))
        file = await store.upload(content)
        assert file.bytes > 40 * MIB
        for offset, length in ((0, 100), (17 * MIB + 3, 3 * MIB), (len(content) - 9, 100)):
            assert (
                await ranged(store, file.id, offset, length) == (content[offset : offset + length])
            )
        batch = await store.create(file.id)
        await store.validated(batch.id)
        (dispatch,) = await store.cut((batch.id, LINES, 1 << 30))
        token = (await store.open(dispatch)).token
        lines = await store.lines(token, [(0, 2), (LINES - 1, 1)])
        assert lines[LINES - 1] == content.splitlines()[LINES - 1]
        for line in range(LINES):
            assert await store.finish(token, [line], batch.id, answer=ANSWER) == 1
        assert sum("/segment/" in name for name in bucket.objects()) == LINES
        await store.settled(batch.id, COMPLETED)
        output, error = await store.end_files(batch.id)
        assert [line["custom_id"] for line in output] == [f"r{line}" for line in range(LINES)]
        assert error == []
        # No blob went to the disk.
        assert not (tmp_path / "data" / "blobs").exists()
        assert bucket.unfinished() == []


async def test_a_store_without_a_bucket_never_loads_its_library(
    tmp_path: Path, bucket: S3Server
) -> None:
    def loaded(process: StoreProcess) -> bool:
        assert process.process is not None
        return "obstore" in Path(f"/proc/{process.process.pid}/maps").read_text()

    async with working(tmp_path / "with", bucket) as store:
        assert loaded(store.store)
        environment = {"NIGHTSHIFT_STORE_BLOBS_URL": ""}
    async with working(tmp_path / "without", bucket, **environment) as store:
        assert not loaded(store.store)


@pytest.mark.parametrize("fault", ["busy", "frozen", "unreachable"])
async def test_it_goes_on_by_itself_when_the_bucket_is_back(
    tmp_path: Path, bucket: S3Server, fault: str
) -> None:
    async with (
        TcpProxy(bucket.port) as proxy,
        working(tmp_path / "data", bucket, port=proxy.port) as store,
    ):
        kept = await store.upload(chat_line("r0"))
        batch_id = await store.batch(3)
        (dispatch,) = await store.cut((batch_id, 3))
        token = (await store.open(dispatch)).token
        assert await store.finish(token, [0], batch_id, answer=ANSWER) == 1

        begun = _begin(fault, bucket, proxy)
        with begun:
            # Small results need no bucket; large ones and uploads are told to come back.
            assert await store.finish(token, [1], batch_id) == 1
            failed = await asyncio.gather(
                store.upload(chat_line("r1")),
                store.finish(token, [2], batch_id, answer=ANSWER),
                store.download(kept.id),
                return_exceptions=True,
            )
            for error in failed:
                assert isinstance(error, UnavailableError), error
                assert error.retry_after_seconds
            assert (await store.get(batch_id)).request_counts.completed == 2
        assert await again(store, token, batch_id) == 1
        await store.settled(batch_id, COMPLETED)
        output, _ = await store.end_files(batch_id)
        assert [line["custom_id"] for line in output] == ["r0", "r1", "r2"]
        assert await store.download(kept.id) == chat_line("r0")


async def test_a_bucket_that_refuses_its_store_is_told_at_once_and_waited_out(
    tmp_path: Path, bucket: S3Server
) -> None:
    bucket.empty()
    bucket.fault(Fault(status=403, code="InvalidAccessKeyId"))
    store = StoreProcess(
        tmp_path / "data", {**bucket.environment(), "AWS_SECRET_ACCESS_KEY": "not-to-be-told"}
    )
    store.start()
    try:
        await said(store, "refuses the store's keys (InvalidAccessKeyId)")
        async with rpc.open_channel(store.address) as channel:
            # It listens: calls that need no bucket are answered.
            await eventually(lambda: rpc.lacking(channel, ["blobs"]), within_seconds=30)
            assert await rpc.lacking(channel, ["database", "disk"]) == []
            assert not await rpc.is_serving(channel)
            bucket.fault(Fault(status=404, code="NoSuchBucket"))
            await said(store, "there is no bucket")
            bucket.fault(None)
            await eventually(lambda: rpc.is_serving(channel), within_seconds=30)
            assert await rpc.lacking(channel, ["blobs"]) == []
        async with client_of(store) as client:
            await client.upload(chat_line("r0"))
        assert "not-to-be-told" not in store.log()
        assert "Traceback" not in store.log()
    finally:
        store.kill()


async def said(store: StoreProcess, words: str) -> None:
    """Wait until a store says in one line what it is not ready for."""

    def found() -> list[str]:
        lines = store.log().splitlines()
        return [line for line in lines if '"not_ready"' in line and words in line]

    await eventually(found, within_seconds=START_SECONDS)


async def test_it_stops_in_time_though_its_bucket_does_not_answer(
    tmp_path: Path, bucket: S3Server
) -> None:
    async with working(tmp_path / "data", bucket) as store:
        batch_id = await store.batch(1)
        (dispatch,) = await store.cut((batch_id, 1))
        token = (await store.open(dispatch)).token
        bucket.process.send_signal(signal.SIGSTOP)
        try:
            assert await store.finish(token, [0], batch_id) == 1
            await store.settled(batch_id, batches_pb2.BATCH_STATUS_FINALIZING)
            assert store.store.stop(STOP_SECONDS) == 0
        finally:
            bucket.process.send_signal(signal.SIGCONT)
        # Whoever comes next ends it at once: what was begun there is nobody's.
        store.store.start()
        await store.ready()
        await store.settled(batch_id, COMPLETED)


async def again(store: Worker, token: str, batch_id: str) -> int:
    """Send a result until it is taken, as executors do."""

    async def sent() -> int:
        with contextlib.suppress(UnavailableError):
            return await store.finish(token, [2], batch_id, answer=ANSWER)
        return 0

    return await eventually(sent, within_seconds=60)


@contextlib.contextmanager
def _begin(fault: str, bucket: S3Server, proxy: TcpProxy) -> Iterator[None]:
    if fault == "busy":
        bucket.fault(Fault())
        yield
        bucket.fault(None)
    elif fault == "frozen":
        bucket.process.send_signal(signal.SIGSTOP)
        yield
        bucket.process.send_signal(signal.SIGCONT)
    else:
        proxy.lose_answers = True
        proxy.cut()
        yield
        proxy.lose_answers = False
        proxy.cut()


async def test_killed_in_the_middle_of_an_upload_nothing_is_named(
    tmp_path: Path, bucket: S3Server
) -> None:
    async with working(tmp_path / "data", bucket) as store:
        kept = await store.upload(chat_line("r0"))
        before = bucket.objects()
        content = os.urandom(4 * PART_BYTES)

        async def frames() -> AsyncIterator[files_pb2.UploadFileRequest]:
            yield files_pb2.UploadFileRequest(header=files_pb2.UploadFileHeader(filename="f"))
            for start in range(0, len(content), MIB):
                yield files_pb2.UploadFileRequest(data=content[start : start + MIB])
            # The parts are on their way, and the end is not said.
            await eventually(bucket.unfinished)
            store.store.kill()

        with pytest.raises((NightshiftError, asyncio.CancelledError)), our_errors():
            await store.files.UploadFile(frames(), metadata=store.metadata)
        # What S3 hides until it is whole never is, and stays for the bucket's lifecycle rule.
        assert bucket.objects() == before
        store.store.start()
        started = Worker(store.store)
        try:
            await started.ready()
            assert await started.download(kept.id) == chat_line("r0")
            answer = await started.files.ListFiles(
                files_pb2.ListFilesRequest(), metadata=started.metadata
            )
            assert [file.id for file in answer.files] == [kept.id]
            file = await started.upload(content, purpose="user_data")
            assert await started.download(file.id) == content
        finally:
            await started.channel.close()


async def test_killed_while_it_writes_an_end_file_another_start_ends_the_batch(
    tmp_path: Path, bucket: S3Server
) -> None:
    armed = {"NIGHTSHIFT_FAILPOINTS": "finalize.write:after=kill"}
    armed["NIGHTSHIFT_FAILPOINTS_DIR"] = str(tmp_path)
    async with working(tmp_path / "data", bucket, **armed) as store:
        batch_id = await ran(store, 3)
        process = store.store.process
        assert process is not None
        await eventually(lambda: process.poll() is not None, within_seconds=30)
        store.store.start()
        started = Worker(store.store)
        try:
            await started.ready()
            await started.settled(batch_id, COMPLETED)
            output, _ = await started.end_files(batch_id)
            assert [line["custom_id"] for line in output] == ["r0", "r1", "r2"]
        finally:
            await started.channel.close()
