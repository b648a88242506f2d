"""What is acknowledged is on disk before the answer leaves, as seen from outside the process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from protos.nightshift.v1 import batches_pb2
from services.kit.wire.errors import InvalidRequestError
from tests.integration.store_work.worker import Worker
from tests.kit.eventually import eventually
from tests.kit.power_cut import Event, PowerCut
from tests.kit.store import StoreProcess, chat_line

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]

T = TypeVar("T")

SLOW_MS = 10
"""How long each sync takes, so that an answer that did not wait for it comes first."""
LINES = 8
BIG = "x" * 400_000


@dataclass
class Watched:
    """A store whose syncs are seen, and a client of it."""

    disk: PowerCut
    client: Worker

    async def during(self, call: Awaitable[T]) -> tuple[T, list[Event]]:
        """Return an answer, and what began and ended between the question and it."""
        began_ns = time.monotonic_ns()
        answer = await call
        answered_ns = time.monotonic_ns()
        found = self.disk.events()
        return answer, [
            each for each in found if began_ns <= each.began_ns and each.ended_ns <= answered_ns
        ]


@contextlib.asynccontextmanager
async def watched(folder: Path, durability: str = "full") -> AsyncIterator[Watched]:
    disk = PowerCut(folder)
    store = StoreProcess(
        disk.root / "data",
        {**disk.environment(delay_ms=SLOW_MS), "NIGHTSHIFT_STORE_DURABILITY": durability},
    )
    store.start()
    client = Worker(store)
    try:
        await client.ready()
        await client.register()
        yield Watched(disk, client)
    finally:
        await client.channel.close()
        store.stop()


def commits(events: list[Event]) -> list[Event]:
    """The syncs that make transactions durable."""
    return [each for each in events if each.kind == "sync" and each.path.name.endswith("-wal")]


def blobs(events: list[Event]) -> list[Event]:
    """The moments at which blobs got their names."""
    return [each for each in events if each.to is not None and "blobs" in each.to.parts]


def check_blobs(events: list[Event], kinds: set[str]) -> None:
    """Each blob is synced, then named, then its folder synced, and only then a row names it."""
    named = blobs(events)
    assert {each.to.parent.name for each in named if each.to} == kinds
    for blob in named:
        assert blob.to is not None
        syncs = [each for each in events if each.kind == "sync"]
        content = [each for each in syncs if each.path == blob.path]
        assert content, f"{blob} was never synced"
        assert content[-1].ended_ns <= blob.began_ns
        folder = [
            each for each in syncs if each.path == blob.to.parent and each.began_ns >= blob.ended_ns
        ]
        assert folder, f"the folder of {blob} was not synced after it"
        after = [each for each in commits(events) if each.began_ns >= folder[0].ended_ns]
        assert after, f"nothing was committed after {blob}"


async def test_each_acknowledgement_waits_for_the_disk(tmp_path: Path) -> None:
    async with watched(tmp_path) as store:
        client = store.client
        content = b"".join(chat_line(f"r{line}") for line in range(LINES))
        file, events = await store.during(client.upload(content))
        check_blobs(events, {"file", "index"})

        batch, events = await store.during(client.create(file.id))
        assert commits(events)
        await client.validated(batch.id)

        (dispatch,) = await client.cut((batch.id, LINES))
        token = (await client.open(dispatch)).token
        _, events = await store.during(client.finish(token, [0, 1], batch.id))
        assert commits(events)
        assert not blobs(events)
        _, events = await store.during(client.finish(token, [2], batch.id, answer=BIG))
        check_blobs(events, {"segment"})

        async def the_rest() -> batches_pb2.Batch:
            await client.finish(token, range(3, LINES), batch.id)
            return await client.settled(batch.id, batches_pb2.BATCH_STATUS_COMPLETED)

        ended, events = await store.during(the_rest())
        check_blobs(events, {"part"})
        assert ended.output_file_id

        other = await client.create(file.id)
        _, events = await store.during(client.cancel(other.id))
        assert commits(events)


async def test_a_deletion_is_on_disk_before_it_is_forgotten(tmp_path: Path) -> None:
    """Else it is undone by a power cut, when no row leads to the file any more."""
    async with watched(tmp_path) as store:

        async def refused() -> None:
            with pytest.raises(InvalidRequestError):
                await store.client.upload(b"no request at all\n")
            # It is deleted behind the answer.
            await eventually(lambda: not store.client.store.blobs(), within_seconds=30)

        _, events = await store.during(refused())
        [blob] = blobs(events)
        assert blob.to is not None

        def synced() -> list[Event]:
            return [
                each
                for each in store.disk.events()
                if each.kind == "sync"
                and each.path == blob.to.parent
                and each.began_ns >= blob.ended_ns
            ]

        # Once for its name, once for its end; then the row is forgotten.
        await eventually(lambda: len(synced()) == 2)
        _, deleted = synced()

        def forgotten() -> list[Event]:
            return [
                each for each in commits(store.disk.events()) if each.began_ns >= deleted.ended_ns
            ]

        await eventually(forgotten)


async def test_many_commits_at_once_share_their_syncs(tmp_path: Path) -> None:
    writers = 64
    async with watched(tmp_path) as store:
        file = await store.client.upload(chat_line("r0"))
        calls = [store.client.create(file.id) for _ in range(writers)]
        batches, events = await store.during(asyncio.gather(*calls))
        assert len({batch.id for batch in batches}) == writers
        # Validating them is among these.
        assert 1 <= len(commits(events)) <= writers // 3


async def test_relaxed_waits_for_no_disk(tmp_path: Path) -> None:
    async with watched(tmp_path, "relaxed") as store:
        client = store.client

        async def all_of_it() -> None:
            batch_id = await client.batch(LINES)
            (dispatch,) = await client.cut((batch_id, LINES))
            token = (await client.open(dispatch)).token
            await client.finish(token, [0], batch_id, answer=BIG)
            await client.cancel(batch_id)

        _, events = await store.during(all_of_it())
        assert blobs(events)
        assert not [each for each in events if each.kind == "sync"]
