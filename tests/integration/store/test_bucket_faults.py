"""A bucket that does not answer as it should: short faults are not seen, long ones are told."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from services.kit.process.clock import ManualClock
from services.kit.process.settings import SettingsError
from services.kit.wire.errors import UnavailableError
from services.store.blobs.base import Blobs, BlobUnreadableError
from services.store.blobs.reader import blob_reader
from services.store.blobs.s3.blobs import PART_BYTES
from services.store.blobs.s3.look import BucketLook
from services.store.blobs.where_kept import open_blobs
from tests.integration.store.places import at_server, bucket, new_name, pieces
from tests.kit.eventually import eventually
from tests.kit.ports import free_port
from tests.kit.s3_server import BUCKET, PREFIX, Fault, S3Server
from tests.kit.tcp_proxy import TcpProxy

__all__ = ["bucket"]

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
async def remote(
    bucket: S3Server, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Blobs, S3Server]]:
    blobs = open_blobs(at_server(bucket, monkeypatch))
    yield blobs, bucket
    bucket.fault(None)
    await blobs.close()


BUSY = Fault(times=2)
BROKEN = Fault(status=500, code="InternalError", times=2)


@pytest.mark.parametrize("fault", [BUSY, BROKEN], ids=["busy", "broken"])
async def test_a_short_fault_is_not_seen(remote: tuple[Blobs, S3Server], fault: Fault) -> None:
    blobs, server = remote
    small, large = new_name(), new_name()
    content = os.urandom(2 * PART_BYTES + 1)
    server.fault(fault)
    await blobs.put("test.step", small, b"small")
    server.fault(fault)
    await blobs.put("test.step", large, pieces(content))
    server.fault(fault)
    assert await blobs.read(large, 0, len(content)) == content
    server.fault(fault)
    await blobs.delete("test.step", small, large)
    assert server.objects() == {}


async def test_an_answer_that_is_lost_makes_no_second_blob(
    remote: tuple[Blobs, S3Server],
) -> None:
    blobs, server = remote
    small, large = new_name(), new_name()
    content = os.urandom(2 * PART_BYTES + 1)
    server.fault(Fault(status=500, code="InternalError", method="PUT", times=1, done=True))
    await blobs.put("test.step", small, b"small")
    server.fault(
        Fault(status=500, code="InternalError", method="POST", query="uploadId", times=1, done=True)
    )
    await blobs.put("test.step", large, pieces(content))
    assert server.objects() == {small: 5, large: len(content)}
    assert await blobs.read(large, 0, len(content)) == content


async def test_a_name_is_never_written_over(remote: tuple[Blobs, S3Server]) -> None:
    blobs, _ = remote
    name = new_name()
    await blobs.put("test.step", name, b"first")
    with pytest.raises(UnavailableError):
        await blobs.put("test.step", name, b"other")
    assert await blobs.read(name, 0, 10) == b"first"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault(status=403, code="InvalidAccessKeyId"), "keys \\(InvalidAccessKeyId\\)"),
        (Fault(status=401, code=""), "refuses the store's keys \\(401\\)"),
        (Fault(status=404, code="NoSuchBucket"), "no bucket nightshift-blobs"),
        (Fault(status=400, code="AuthorizationHeaderMalformed"), "AWS_REGION is not"),
        (Fault(status=503, code="SlowDown"), "answers 503 SlowDown"),
    ],
)
async def test_a_look_at_a_bucket_says_what_is_wrong(
    remote: tuple[Blobs, S3Server], fault: Fault, says: str
) -> None:
    blobs, server = remote
    server.fault(fault)
    with pytest.raises(UnavailableError, match=says):
        await blobs.look()
    server.fault(None)
    await blobs.look()


async def test_a_bucket_without_a_server_or_keys_is_told(
    bucket: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = at_server(bucket, monkeypatch, port=free_port())
    with pytest.raises(UnavailableError, match="AWS_ENDPOINT_URL"):
        await open_blobs(settings).look()
    with pytest.raises(UnavailableError, match="AWS_ENDPOINT_URL"):
        await asyncio.to_thread(next, blob_reader(settings).names())
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SettingsError, match="Missing SecretAccessKey"):
        open_blobs(settings)


async def test_one_look_in_vain_may_be_chance_and_a_bucket_that_is_well_is_left_alone(
    bucket: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_server(bucket, monkeypatch)
    clock = ManualClock()
    look = BucketLook(BUCKET, PREFIX, monotonic=clock.monotonic)
    await look.look()
    bucket.fault(Fault(times=3))
    clock.advance(4.9)
    await look.look()
    clock.advance(0.2)
    await look.look()
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await look.look()
    await look.look()


async def test_an_object_that_is_refused_is_told_from_a_bucket_that_is(
    remote: tuple[Blobs, S3Server],
) -> None:
    blobs, server = remote
    name = new_name()
    await blobs.put("test.step", name, b"x")
    # Of objects only: the bucket lists.
    server.fault(Fault(status=403, code="InvalidObjectState", query="^$"))
    with pytest.raises(BlobUnreadableError) as refused:
        await blobs.read(name, 0, 1)
    assert (refused.value.name, refused.value.why) == (name, "InvalidObjectState")
    server.fault(Fault(status=403, code="InvalidAccessKeyId"))
    with pytest.raises(UnavailableError) as refused_all:
        await blobs.read(name, 0, 1)
    assert not isinstance(refused_all.value, BlobUnreadableError)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=503, code="SlowDown"),
        Fault(status=403, code="AccessDenied"),
        Fault(status=404, code="NoSuchBucket"),
    ],
    ids=lambda fault: fault.code,
)
async def test_a_long_fault_says_to_come_back_and_is_no_missing_blob(
    remote: tuple[Blobs, S3Server], fault: Fault
) -> None:
    blobs, server = remote
    name, lost = new_name(), new_name()
    await blobs.put("test.step", name, b"there")
    server.fault(fault)
    failed = await asyncio.gather(
        blobs.read(name, 0, 5),
        blobs.put("test.step", lost, b"small"),
        blobs.put("test.step", lost, pieces(os.urandom(2 * PART_BYTES))),
        blobs.delete("test.step", name),
        return_exceptions=True,
    )
    for error in failed:
        if fault.code == "NoSuchBucket" and error is None:
            continue
        assert isinstance(error, UnavailableError), error
        assert error.retry_after_seconds is not None
        assert 0 < error.retry_after_seconds <= 60
    server.fault(None)
    assert await blobs.read(name, 0, 5) == b"there"
    assert server.objects() == {name: 5}
    await blobs.put("test.step", lost, b"again")


def test_a_check_takes_a_missing_bucket_for_no_missing_blob(
    bucket: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = at_server(bucket, monkeypatch)
    assert blob_reader(there).size(new_name()) is None
    away = blob_reader(there.model_copy(update={"blobs_url": f"s3://no-{BUCKET}/{PREFIX}"}))
    with pytest.raises(UnavailableError):
        away.size(new_name())


@pytest.mark.parametrize(
    "fault",
    [Fault(method="PUT", query="partNumber=2"), Fault(method="POST", query="uploadId")],
    ids=["part", "completion"],
)
async def test_an_upload_that_fails_half_way_is_aborted(
    remote: tuple[Blobs, S3Server], fault: Fault
) -> None:
    blobs, server = remote
    server.fault(fault)
    with pytest.raises(UnavailableError):
        await blobs.put("test.step", new_name(), pieces(os.urandom(4 * PART_BYTES)))
    await blobs.close()
    assert server.objects() == {}
    assert server.unfinished() == []


async def test_a_server_that_is_away_for_a_moment(
    bucket: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TcpProxy(bucket.port) as proxy:
        blobs = open_blobs(at_server(bucket, monkeypatch, proxy.port))
        name = new_name()
        content = os.urandom(4 * PART_BYTES)

        async def slowly() -> AsyncIterator[memoryview]:
            yield memoryview(content)[: 2 * PART_BYTES]
            await eventually(lambda: proxy.sent > PART_BYTES)
            proxy.cut()
            yield memoryview(content)[2 * PART_BYTES :]

        try:
            await blobs.put("test.step", name, slowly())
        except UnavailableError:
            await eventually(lambda: bucket.objects() == {})
            await blobs.put("test.step", name, pieces(content))
        assert await blobs.read(name, 0, len(content)) == content
        await blobs.close()
