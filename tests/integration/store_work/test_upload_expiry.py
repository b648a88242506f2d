"""An upload's hour, under a clock that the test sets."""

import pytest

from protos.nightshift.v1 import files_pb2, uploads_pb2
from services.kit.wire.errors import InvalidRequestError
from services.store.tables.uploads import upload_parts, uploads
from tests.integration.store_work.harness import Store
from tests.kit.store import chat_line, refused
from tests.kit.uploads import add, cancel, complete, create

LINE = chat_line("r1")


# contract: 95
async def test_an_upload_expires_after_an_hour(store: Store) -> None:
    upload = await create(store, 2 * len(LINE))
    assert upload.expires_at - upload.created_at == 3600
    part = await add(store, upload.id, LINE)
    store.clock.advance(3599)
    last = await add(store, upload.id, LINE.replace(b"r1", b"r2"))
    store.clock.advance(1)

    # Nothing has swept yet: the clock alone decides.
    for call in (
        add(store, upload.id, b""),
        complete(store, upload.id, [part, last]),
        cancel(store, upload.id),
    ):
        with pytest.raises(InvalidRequestError, match="expired") as error:
            await call
        assert refused(error) == (400, None, "upload_id")


async def test_parts_of_an_expired_upload_are_dropped(store: Store) -> None:
    kept = await create(store, len(LINE))
    part = await add(store, kept.id, LINE)
    done = await complete(store, kept.id, [part])
    before = await store.sweeper.run_once()
    late = await create(store, len(LINE))
    await add(store, late.id, LINE)
    store.clock.advance(1800)
    young = await create(store, len(LINE))
    young_part = await add(store, young.id, LINE)
    assert (before, await store.sweeper.run_once()) == (1, 0)
    store.clock.advance(1800)

    assert await store.sweeper.run_once() == 2

    assert await store.sql(uploads.select().where(uploads.c.status == "expired")) != []
    assert [row.id for row in await store.sql(upload_parts.select())] == [young_part]
    with pytest.raises(InvalidRequestError, match="expired"):
        await cancel(store, late.id)
    assert await store.download(done.file.id) == LINE
    assert (await complete(store, young.id, [young_part])).file.bytes == len(LINE)
    # A completed one stays completed.
    assert (await complete(store, kept.id, [part])).status == uploads_pb2.UPLOAD_STATUS_COMPLETED


async def test_a_files_expiry_counts_from_its_own_creation(store: Store) -> None:
    expiry = files_pb2.ExpiresAfter(anchor="created_at", seconds=7200)
    upload = await create(store, len(LINE), expires_after=expiry)
    part = await add(store, upload.id, LINE)
    store.clock.advance(1000)
    file = (await complete(store, upload.id, [part])).file
    assert file.created_at == upload.created_at + 1000
    assert file.expires_at == file.created_at + 7200
