"""Objects that are gone from a bucket, told from a bucket that is."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2
from services.kit.wire.errors import LostError, UnavailableError
from services.store.ending import salvage
from services.store.tables.core import segments
from services.store.work.results_repo import INLINE_BYTES
from tests.integration.store_work.harness import Store, running
from tests.integration.store_work.losing import input_of, opened
from tests.kit.s3_server import Fault, S3Server, s3_server

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CANCELLED = batches_pb2.BATCH_STATUS_CANCELLED
CANCELLING = batches_pb2.BATCH_STATUS_CANCELLING
AWAY = (
    Fault(status=404, code="NoSuchBucket"),
    # As something on the way may answer.
    Fault(status=404, code="NotFound"),
)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
async def store(
    bucket: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Store]:
    """Run a store of this process on the bucket."""
    monkeypatch.setattr(salvage, "CONFIRM_SECONDS", 0.01)
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    bucket.fault(None)
    async with running(tmp_path / "data", blobs_url=bucket.url) as store:
        yield store
    bucket.fault(None)


async def test_an_index_is_made_again(store: Store, bucket: S3Server) -> None:
    batch_id = await store.batch(3)
    old = (await input_of(store, batch_id)).index_blob
    bucket.drop(old)
    _, token = await opened(store, batch_id, 3)
    assert len(await store.lines(token, [(0, 3)])) == 3
    new = (await input_of(store, batch_id)).index_blob
    assert new != old
    assert new in bucket.objects()


@pytest.mark.parametrize("away", AWAY, ids=["bucket", "server"])
async def test_what_is_dropped_is_lost_and_what_is_away_is_not(
    store: Store, bucket: S3Server, away: Fault
) -> None:
    batch_id = await store.batch(4)
    _, token = await opened(store, batch_id, 4)
    await store.finish(token, [0], batch_id, answer="x" * INLINE_BYTES)
    await store.finish(token, [1], batch_id)
    file = await input_of(store, batch_id)
    ((name,),) = await store.sql(sa.select(segments.c.blob).where(segments.c.blob.is_not(None)))

    bucket.fault(away)
    with pytest.raises(UnavailableError):
        await store.lines(token, [(2, 2)])
    with pytest.raises(UnavailableError):
        await store.download(file.id)
    assert (await store.get(batch_id)).nightshift.reason == ""
    bucket.fault(None)
    assert len(await store.lines(token, [(2, 2)])) == 2

    bucket.drop(file.parts[0][0])
    bucket.drop(name)
    with pytest.raises(LostError):
        await store.lines(token, [(2, 2)])
    with pytest.raises(LostError):
        await store.download(file.id)
    bucket.fault(away)
    await store.cancel(batch_id)
    store.clock.advance(2)
    await store.turn()
    assert (await store.get(batch_id)).status == CANCELLING
    bucket.fault(None)
    store.clock.advance(5)
    await store.turn()
    batch = await store.get(batch_id)
    assert batch.status == CANCELLED
    assert [error.code for error in batch.errors] == ["input_lost", "results_lost"]
    output, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in output] == ["r1"]
    codes = [line["error"]["code"] for line in error]
    assert codes == ["result_lost", "batch_cancelled", "batch_cancelled"]
