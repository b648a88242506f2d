"""The check of a batch of several models, each of which is cut behind a cursor of its own."""

import asyncio
from pathlib import Path

import pytest

from protos.nightshift.v1 import admin_pb2, models_pb2, work_pb2
from services.kit.wire import ids
from tests.integration.store_work.harness import Store, running
from tests.integration.store_work.worker import ranges_of
from tests.kit.data_at_rest import Data, check, rounds
from tests.kit.store import MODEL, POOL, chat_line

pytestmark = pytest.mark.integration

OTHER = ids.pool_id_of("other")
MODELS = [MODEL, "other", MODEL, "other", "other", MODEL, MODEL, "other"]


async def _cut(store: Store, batch_id: str, pool: str, lines: int) -> str:
    """Cut a chunk for a pool and open it; return its token."""
    await store.lead()
    wanted = work_pb2.Cut(batch_id=batch_id, pool_id=pool, max_lines=lines, max_bytes=1 << 30)
    answer = await store.work.CutChunks(
        work_pb2.CutChunksRequest(term=store.term, cuts=[wanted]), metadata=store.metadata
    )
    (dispatch,) = answer.dispatches
    opened = await store.open(dispatch)
    token: str = opened.token
    lines_of = [n for first, count in ranges_of(opened.lines) for n in range(first, first + count)]
    assert {MODELS[n] == "other" for n in lines_of} == {pool == OTHER}
    return token


async def _make(root: Path) -> str:
    """Lines 0 and 2 (of the first model) are done, 1 and 3 (of the other) are out."""
    async with running(root, mixed_models=True) as store:
        (root / "secret").chmod(0o600)
        await store.admin.PutModels(
            admin_pb2.PutModelsRequest(models=[models_pb2.Model(id="other", pool_id=OTHER)]),
            metadata=store.metadata,
        )
        lines = [chat_line(f"r{n}", model=model) for n, model in enumerate(MODELS)]
        batch_id = await store.batch(lines)
        token = await _cut(store, batch_id, POOL, 2)
        assert await store.finish(token, [0, 2], batch_id) == 2
        await _cut(store, batch_id, OTHER, 2)
        found = await asyncio.to_thread(check, root, deep=True)
        assert found.faults == []
    return batch_id


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Make the directory once; tests copy it."""
    root = tmp_path_factory.mktemp("pristine") / "data"
    return Data(root, asyncio.run(_make(root)), "", "")


@pytest.mark.parametrize(
    ("statement", "kind", "what", "is_mended"),
    [
        ("UPDATE batch_models SET cut = cut + 1", "open batches", "cut is 3 instead of 2", True),
        ("UPDATE batch_models SET next_line = 2", "chunks", "has chunks up to line 3", True),
        ("UPDATE batch_models SET next_line = 8", "chunks", "lines 4-7 were cut, have no", False),
        ("UPDATE batch_models SET seq = 77", "open batches", "seq is 77 instead of", True),
        ("UPDATE batches SET lines_cut = 1", "open batches", "lines_cut is 1; its models'", True),
        ("UPDATE chunks SET pool_id = 'x'", "chunks", "is queued for pool x as of", True),
        ("UPDATE chunks SET model = 'x'", "chunks", "is of a model that batch_", False),
        ("DELETE FROM batch_models", "open batches", "has 0 rows of models, but is one", False),
    ],
)
def test_damaged_cursors_are_named(
    pristine: Data, tmp_path: Path, statement: str, kind: str, what: str, is_mended: bool
) -> None:
    data = pristine.copy(tmp_path / "data")
    data.sql(statement)
    looks = list(rounds(data))
    assert any(what in each for each in looks[0].of(kind)), looks[0].faults
    assert all(fault["mend"] for fault in looks[0].faults)
    assert (looks[-1].faults == []) == is_mended
