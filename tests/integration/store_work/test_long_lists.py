"""Lists of what is large: an answer takes as many as a message may hold, and says that there are
more."""

from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import batches_pb2, common_pb2, files_pb2
from services.kit.wire import ids
from services.store.tables.core import batches, counters, files, models, pools
from tests.integration.store_work.harness import Store
from tests.kit.store import POOL, our_errors

pytestmark = pytest.mark.integration

MESSAGE_BYTES = 4 * 1024 * 1024


async def put(store: Store, table: sa.Table, rows: Sequence[dict[str, Any]]) -> None:
    """Put rows there as if their owners had made them, which would take long."""

    def insert(connection: sa.Connection) -> None:
        connection.execute(table.insert(), list(rows))
        connection.execute(counters.update().values(n=len(rows)))

    await store.context.db.write("test.step", insert)


def batch(seq: int) -> dict[str, Any]:
    return {
        "id": f"batch_{seq:032x}",
        "seq": seq,
        "project_id": "default",
        "endpoint": "/v1/chat/completions",
        "input_file_id": "file-none",
        "completion_window": "24h",
        "created_at": 1,
        "expires_ms": 2**42,
    }


async def test_files_with_long_names(store: Store) -> None:
    number = 500
    rows = [
        {
            "id": f"file-{seq:032x}",
            "seq": seq,
            "project_id": "default",
            "purpose": "batch",
            "filename": "\N{FULL MOON SYMBOL}" * 4_096,
            "bytes": 0,
            "status": "processed",
            "created_at": 1,
            "parts": [],
        }
        for seq in range(1, number + 1)
    ]
    assert sum(len(str(row["filename"]).encode()) for row in rows) > MESSAGE_BYTES
    await put(store, files, rows)
    seen: list[str] = []
    has_more = True
    while has_more:
        request = files_pb2.ListFilesRequest(
            page=common_pb2.PageRequest(after=seen[-1] if seen else ""), ascending=True
        )
        with our_errors():
            answer = await store.files.ListFiles(request, metadata=store.metadata)
        seen += [file.id for file in answer.files]
        has_more = answer.has_more
    assert seen == [row["id"] for row in rows]


async def test_batches_with_long_errors(store: Store) -> None:
    number = 100
    fault = {"code": "model_not_found", "line": 1, "message": "m" * 600, "param": "body.model"}
    ended = {"failed_at": 2, "sealed_ms": 2_000, "seal_outcome": "failed"}
    rows = [
        {**batch(seq), "status": "failed", **ended, "errors": [fault] * 100}
        for seq in range(1, number + 1)
    ]
    assert number * 100 * len(fault["message"]) > MESSAGE_BYTES
    await put(store, batches, rows)
    seen: list[str] = []
    has_more = True
    while has_more:
        page = common_pb2.PageRequest(after=seen[-1] if seen else "", limit=number)
        with our_errors():
            answer = await store.batches.ListBatches(
                batches_pb2.ListBatchesRequest(page=page), metadata=store.metadata
            )
        seen += [batch.id for batch in answer.batches]
        has_more = answer.has_more
    assert seen == [row["id"] for row in reversed(rows)]


async def test_a_window_over_many_pools(store: Store) -> None:
    """Each pool has its share, and the store says how large that is."""
    names = [ids.pool_id_of(f"{'a-long-name-of-a-model' * 2}-{number}") for number in range(40)]
    now_at = int(store.clock.now())
    await put(store, pools, [{"id": each, "name": each, "created_at": now_at} for each in names])
    served = [
        {"name": each, "pool_id": each, "endpoints": [], "created_at": now_at} for each in names
    ]
    await put(store, models, served)
    runs = {"status": "in_progress", "in_progress_at": 1, "lines_total": 9}
    rows = [{**batch(seq), **runs, "pool_id": names[seq % 40]} for seq in range(1, 16_001)]
    await put(store, batches, rows)
    await store.lead()
    window = await store.window()
    # The pool of the store's own executor is the forty-first.
    assert set(window.pool_ids) == {POOL, *names}
    assert window.batches_per_pool == 16_000 // 41
    assert len(window.batches) == 40 * window.batches_per_pool
    assert window.ByteSize() < MESSAGE_BYTES
    assert [each.seq for each in window.batches] == list(range(1, len(window.batches) + 1))
    assert (await store.window(7)).batches_per_pool == 7
