"""What a store acknowledged survives its SIGKILL, and nothing is recorded twice."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protos.nightshift.v1 import batches_pb2, work_pb2
from services.kit.wire.errors import UnavailableError
from tests.integration.store_work.worker import Worker, frame
from tests.kit.store import StoreProcess, our_errors
from tests.kit.streams import all_told

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LINES = 3_000
FRAME_LINES = 30


async def append_until_killed(
    client: Worker, store: StoreProcess, frames: list[work_pb2.AppendResultsRequest], kill_at: int
) -> int:
    """Send frames and kill the store at an acknowledgement; return how many frames it gave."""
    # Some are under way at the kill, and some were never sent.
    call = client.work.AppendResults(iter(frames[: kill_at + 20]), metadata=client.metadata)
    acknowledged = 0
    with contextlib.suppress(UnavailableError), our_errors():
        async for answer in all_told(call):
            assert answer.frame == acknowledged + 1
            acknowledged = answer.frame
            if acknowledged == kill_at:
                store.kill()
    return acknowledged


@pytest.fixture
async def killable(tmp_path: Path) -> AsyncIterator[StoreProcess]:
    store = StoreProcess(tmp_path / "data")
    store.start()
    yield store
    store.stop()


async def test_acknowledged_results_survive_and_repeats_change_nothing(
    killable: StoreProcess,
) -> None:
    client = Worker(killable)
    await client.ready()
    await client.register()
    batch_id = await client.batch(LINES)
    (dispatch,) = await client.cut((batch_id, LINES))
    token = (await client.open(dispatch)).token
    frames = [
        frame(
            token,
            batch_id,
            range(start, start + FRAME_LINES),
            number=start // FRAME_LINES + 1,
            # Every fourth frame is large enough to be a blob.
            answer="x" * (9_000 if start % (4 * FRAME_LINES) == 0 else 10),
        )
        for start in range(0, LINES, FRAME_LINES)
    ]
    for kill_at in (20, 60):
        acknowledged = await append_until_killed(client, killable, frames, kill_at)
        assert acknowledged >= kill_at
        await client.channel.close()
        killable.start()
        client = Worker(killable)
        await client.ready()
        done = (await client.get(batch_id)).request_counts.completed
        assert acknowledged * FRAME_LINES <= done < LINES
        assert done % FRAME_LINES == 0

    accepted = sum(ack.accepted for ack in await client.append(*frames))
    assert accepted == LINES - done
    batch = await client.settled(batch_id, batches_pb2.BATCH_STATUS_COMPLETED)
    assert batch.request_counts == batches_pb2.RequestCounts(total=LINES, completed=LINES)
    assert batch.usage.input_tokens == 3 * LINES
    output, error = await client.end_files(batch_id)
    assert [line["custom_id"] for line in output] == [f"r{line}" for line in range(LINES)]
    assert error == []
    await client.channel.close()
