"""Lists of batches: pages, limits, and what lies between two answers of the store."""

import httpx2
import pytest
from openai import AsyncOpenAI

from protos.nightshift.v1 import batches_pb2
from tests.kit.public_store import ScriptedStore, batch_id, make_batch

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_list_pages_itself(client: AsyncOpenAI, store: ScriptedStore) -> None:
    store.script(
        "ListBatches",
        batches_pb2.ListBatchesResponse(batches=[make_batch(5), make_batch(4)], has_more=True),
        batches_pb2.ListBatchesResponse(batches=[make_batch(3), make_batch(2)], has_more=True),
        batches_pb2.ListBatchesResponse(batches=[make_batch(1)]),
    )
    seen = [batch.id async for batch in client.batches.list(limit=2)]
    assert seen == [batch_id(number) for number in (5, 4, 3, 2, 1)]
    after = [request.page.after for request in store.requests("ListBatches")]
    assert after == ["", batch_id(4), batch_id(2)]


async def test_long_list_is_gathered(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    numbers = list(range(100, 0, -1))
    store.script(
        "ListBatches",
        *(
            batches_pb2.ListBatchesResponse(
                batches=[make_batch(number) for number in numbers[start : start + 25]],
                has_more=True,
            )
            for start in range(0, 100, 25)
        ),
    )
    listed = (await http.get("/v1/batches?limit=100")).json()
    assert [batch["id"] for batch in listed["data"]] == [batch_id(number) for number in numbers]
    assert listed["has_more"] is True
    assert (listed["first_id"], listed["last_id"]) == (batch_id(100), batch_id(1))


@pytest.mark.parametrize(
    ("limit", "code"),
    [("0", "integer_below_min_value"), ("101", "integer_above_max_value"), ("x", "invalid_type")],
)
async def test_bad_limit(http: httpx2.AsyncClient, limit: str, code: str) -> None:
    answer = await http.get(f"/v1/batches?limit={limit}")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    if limit == "101":
        assert answer.json()["error"]["message"] == (
            "Invalid 'limit': integer above maximum value. Expected a value <= 100, but got 101 "
            "instead."
        )
