"""Power is cut again and again under load; what was acknowledged is there, and all of it agrees.

`NIGHTSHIFT_POWER_CUTS=200 pytest tests/integration/store/test_power_cut.py` cuts it more often.
"""

import asyncio
import os
import random
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from protos.nightshift.v1 import batches_pb2
from services.kit.process.tasks import end
from services.kit.wire.errors import ConflictError, NotFoundError, UnavailableError
from tests.integration.store_work.worker import Worker, ranges_of
from tests.kit import data_at_rest
from tests.kit.eventually import eventually
from tests.kit.power_cut import PowerCut
from tests.kit.store import START_SECONDS, StoreProcess, chat_line

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(36_000)]

ROUNDS = int(os.environ.get("NIGHTSHIFT_POWER_CUTS", "4"))
WORKERS = 4
MOST_LINES = 12
BIG = "x" * 270_000
#: Places that a round dies at, where it is not cut at any moment.
PLACES = (
    "file.write:after",
    "file.create:before",
    "file.create:after",
    "batch.create:after",
    "batch.start:after",
    "result.write:after",
    "result.record:before",
    "result.record:after",
    "batch.cancel:after",
    "finalize.write:after",
    "finalize.end:before",
    "finalize.end:after",
)
_OVER = (batches_pb2.BATCH_STATUS_COMPLETED, batches_pb2.BATCH_STATUS_CANCELLED)


@dataclass
class Acknowledged:
    """What the store has said yes to, over all rounds."""

    files: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    #: Line → answer, by batch; only those that the store said were first.
    results: dict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    said: int = 0


class Load:
    """What clients, a scheduler and executors do until the power is cut."""

    def __init__(self, client: Worker, known: Acknowledged, chance: random.Random) -> None:
        self.client = client
        self.known = known
        self.chance = chance

    async def run(self) -> None:
        """Go on until the store is gone."""
        try:
            while True:
                await self._one_batch()
        except UnavailableError:
            return

    async def _one_batch(self) -> None:
        client, known, chance = self.client, self.known, self.chance
        lines = chance.randint(1, MOST_LINES)
        content = b"".join(chat_line(f"r{line}", str(known.said)) for line in range(lines))
        file = await client.upload(content)
        known.files[file.id] = content
        batch = await client.create(file.id)
        known.batches[batch.id] = lines
        known.said += 2
        await eventually(lambda: self._runs(batch.id))
        for dispatch in await client.cut((batch.id, lines)):
            answer = await client.deliver(dispatch, f"e{id(self)}")
            if answer.WhichOneof("outcome") == "opened":
                await self._work(batch.id, answer.opened.token, ranges_of(answer.opened.lines))

    async def _runs(self, batch_id: str) -> bool:
        return (await self.client.get(batch_id)).status != batches_pb2.BATCH_STATUS_VALIDATING

    async def _work(self, batch_id: str, token: str, ranges: list[tuple[int, int]]) -> None:
        left = [line for first, count in ranges for line in range(first, first + count)]
        while left:
            some, left = left[:3], left[3:]
            self.known.said += 1
            # One large line is a frame of its own.
            big = self.chance.random() < 0.3
            answer = f"{self.known.said}{BIG if big else ''}"
            accepted = await self.client.finish(
                token, some[:1] if big else some, batch_id, answer=answer
            )
            if big:
                left = some[1:] + left
                some = some[:1]
            if accepted == len(some):
                self.known.results[batch_id].update(dict.fromkeys(some, answer))
            if self.chance.random() < 0.1:
                await self._cancel(batch_id)

    async def _cancel(self, batch_id: str) -> None:
        try:
            await self.client.cancel(batch_id)
        except ConflictError:
            return
        self.known.cancelled.add(batch_id)
        self.known.said += 1


async def check(client: Worker, known: Acknowledged) -> None:
    """Everything that was acknowledged is there."""
    for file_id, content in known.files.items():
        assert await client.download(file_id) == content
    for batch_id, lines in known.batches.items():
        batch = await client.get(batch_id)
        assert batch.input_file_id in known.files
        if batch.HasField("in_progress_at"):
            assert batch.request_counts.total == lines
        assert batch.request_counts.completed >= len(known.results[batch_id])
        if batch_id in known.cancelled:
            assert batch.cancelling_at
        if batch.status in _OVER:
            output, error = await client.end_files(batch_id)
            answers = {line["custom_id"]: line["response"]["body"]["answer"] for line in output}
            for line, answer in known.results[batch_id].items():
                assert answers[f"r{line}"] == answer
            if batch.request_counts.total:
                assert len(output) + len(error) == lines


async def begins(client: Worker, known: Acknowledged, process: subprocess.Popen[bytes]) -> bool:
    """Check a store that was just started; False where what was left brought it to its place."""

    async def begin() -> None:
        await client.ready()
        await client.register()
        await check(client, known)

    beginning = asyncio.create_task(begin())
    await eventually(
        lambda: beginning.done() or process.poll() is not None, within_seconds=2 * START_SECONDS
    )
    if not beginning.done():
        await end(beginning)
        return False
    try:
        await beginning
    except UnavailableError:
        await eventually(lambda: process.poll() is not None)
        return False
    return True


@pytest.mark.parametrize("seed", range(2))
async def test_what_was_acknowledged_survives_power_cuts(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    disk = PowerCut(tmp_path)
    known = Acknowledged()
    for _ in range(ROUNDS):
        at = {}
        if chance.random() < 0.5:
            place = f"{chance.choice(PLACES)}@{chance.randint(1, 6)}=kill"
            at["NIGHTSHIFT_FAILPOINTS"] = place
        store = StoreProcess(disk.root / "data", {**disk.environment(delay_ms=1), **at})
        store.start()
        client = Worker(store)
        process = store.process
        assert process is not None
        load = []
        if await begins(client, known, process):
            load = [asyncio.create_task(Load(client, known, chance).run()) for _ in range(WORKERS)]
        enough = known.said + chance.randint(5, 60)
        await eventually(
            lambda process=process, enough=enough: (
                known.said >= enough or process.poll() is not None
            ),
            within_seconds=60,
            every_seconds=0.001,
        )
        store.kill()
        await end(*load)
        for outcome in await asyncio.gather(*load, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        await client.channel.close()
        disk.cut()
        found = data_at_rest.check(disk.root / "data", deep=True)
        assert not found.faults, found.faults
    assert known.said >= 20
    assert known.results


async def one_batch_then_a_cut(disk: PowerCut, environment: dict[str, str]) -> str:
    """Create a batch, see that it was acknowledged, and cut the power; return its id."""
    store = StoreProcess(disk.root / "data", environment)
    store.start()
    client = Worker(store)
    try:
        await client.ready()
        file = await client.upload(chat_line("r0"))
        batch = await client.create(file.id)
    finally:
        await client.channel.close()
        store.kill()
    disk.cut()
    return batch.id


async def test_relaxed_durability_does_lose_it(tmp_path: Path) -> None:
    disk = PowerCut(tmp_path)
    relaxed = {**disk.environment(), "NIGHTSHIFT_STORE_DURABILITY": "relaxed"}
    batch_id = await one_batch_then_a_cut(disk, relaxed)
    store = StoreProcess(disk.root / "data")
    store.start()
    client = Worker(store)
    try:
        await client.ready()
        with pytest.raises(NotFoundError):
            await client.get(batch_id)
    finally:
        await client.channel.close()
        store.stop()


@pytest.mark.parametrize("unsynced", ["/blobs/", "/blobs/default/file", "/blobs/tmp/", "db-wal"])
async def test_a_sync_that_is_left_out_is_found(tmp_path: Path, unsynced: str) -> None:
    disk = PowerCut(tmp_path)
    await one_batch_then_a_cut(disk, disk.environment(ignore=unsynced))
    data = disk.root / "data"
    if unsynced == "db-wal":
        assert not (data / "nightshift.db-wal").stat().st_size
        return
    found = data_at_rest.check(data, deep=True)
    assert found.of("blobs") + found.of("files"), found
