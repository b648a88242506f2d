"""A batch from its cut to its end files, as scheduler and executor drive it."""

import pytest

from protos.nightshift.v1 import batches_pb2
from tests.integration.store_work.harness import Store
from tests.integration.store_work.worker import frame, ranges_of
from tests.kit.store import chat_line

pytestmark = pytest.mark.integration


async def test_a_batch_runs_to_completed(store: Store) -> None:
    batch_id = await store.batch(5)
    first, second = await store.cut((batch_id, 3), (batch_id, 3))
    assert [ranges_of(each.lines) for each in (first, second)] == [[(0, 3)], [(3, 2)]]
    assert first.endpoint == "/v1/chat/completions"
    assert first.model == "simulated"
    assert (first.dispatch, first.alone) == (1, False)

    one, two = await store.open(first), await store.open(second, "e1")
    assert (one.attempt, ranges_of(one.lines)) == (1, [(0, 3)])
    lines = await store.lines(one.token, [(0, 3)])
    assert lines == {n: chat_line(f"r{n}").rstrip(b"\n") for n in range(3)}

    acks = await store.append(
        frame(two.token, batch_id, [4, 3], failed=[3]), frame(one.token, batch_id, [1], number=2)
    )
    assert [(ack.frame, ack.accepted, ack.sealed) for ack in acks] == [(1, 2, False), (2, 1, False)]
    running = await store.get(batch_id)
    assert running.request_counts == batches_pb2.RequestCounts(total=5, completed=2, failed=1)
    assert await store.finish(one.token, [2, 1, 0], batch_id) == 2

    assert (await store.get(batch_id)).status == batches_pb2.BATCH_STATUS_FINALIZING
    await store.turn()
    ended = await store.get(batch_id)
    assert ended.status == batches_pb2.BATCH_STATUS_COMPLETED
    assert ended.request_counts == batches_pb2.RequestCounts(total=5, completed=4, failed=1)
    assert ended.usage.input_tokens == 15
    assert ended.usage.output_tokens == 30
    output, error = await store.end_files(batch_id)
    assert [line["custom_id"] for line in output] == ["r0", "r1", "r2", "r4"]
    assert [line["custom_id"] for line in error] == ["r3"]
    assert error[0]["response"]["status_code"] == 500
