"""Stored content that is taken away behind a store's back, and what is seen of it."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import dispatch_pb2, events_pb2
from services.store.checkup import doctor
from services.store.ending import salvage
from services.store.settings import StoreSettings
from services.store.tables.core import batches, files
from tests.integration.store_work.harness import Store, databases
from tests.kit.store import our_errors


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look again at once for what is missing; in every module that imports it."""
    monkeypatch.setattr(salvage, "CONFIRM_SECONDS", 0.01)


async def input_of(store: Store, batch_id: str) -> Any:
    """The row of a batch's input file."""
    (row,) = await store.sql(
        sa.select(files)
        .join(batches, batches.c.input_file_id == files.c.id)
        .where(batches.c.id == batch_id)
    )
    return row


async def taken(store: Store, name: str) -> bytes:
    """Delete a blob behind the store's back; return what it held."""
    content = await store.context.blobs.read(name, 0, 1 << 24)
    await store.context.blobs.delete("test.step", name)
    return content


async def put_back(store: Store, name: str, content: bytes) -> None:
    await store.context.blobs.put("test.step", name, content)


@contextlib.contextmanager
def refused(store: Store, *names: str) -> Iterator[None]:
    """Have the disk refuse to read these blobs while the block runs, whoever asks for them."""
    folder = store.context.settings.data_dir
    aside = {folder / "blobs" / name: folder / f"aside-{name.rpartition('/')[2]}" for name in names}
    for blob, kept in aside.items():
        blob.rename(kept)
        blob.mkdir()
    yield
    for blob, kept in aside.items():
        blob.rmdir()
        kept.rename(blob)


async def input_taken(store: Store, batch_id: str) -> tuple[str, bytes]:
    """Delete the whole content of a batch's input; return the blob's name and what it held."""
    ((name, _),) = (await input_of(store, batch_id)).parts
    return name, await taken(store, name)


async def opened(store: Store, batch_id: str, lines: int) -> tuple[dispatch_pb2.Dispatch, str]:
    (dispatch,) = await store.cut((batch_id, lines))
    return dispatch, (await store.open(dispatch)).token


async def told_lines(store: Store, batch_id: str) -> list[Any]:
    """What a stream from the start tells of an ended batch."""
    watch = events_pb2.WatchBatchRequest(batch_id=batch_id, include_results=True)
    lines, ended = b"", False
    while not ended:
        with our_errors():
            page = await store.events.ReadBatchEvents(
                events_pb2.ReadBatchEventsRequest(watch=watch), metadata=store.metadata
            )
        lines += b"".join(event.results.lines for event in page.events)
        watch.after, ended = page.next, page.ended
    return [orjson.loads(line) for line in lines.splitlines()]


async def checked(store: Store) -> list[dict[str, object]]:
    """What a check that reads everything finds at fault."""
    data = store.context.settings.data_dir
    await asyncio.to_thread((data / "secret").chmod, 0o600)
    settings = StoreSettings(data_dir=data, database_url=databases.of(data))
    said: list[dict[str, object]] = []
    await asyncio.to_thread(doctor.check, settings, said.append, deep=True)
    return [each for each in said if each["event"] == "fault"]
