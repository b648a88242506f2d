"""Leadership is a row: taken when free, kept by renewing, checked on every scheduler call."""

import pytest

from protos.nightshift.v1 import work_pb2
from services.kit.wire.errors import StaleTermError
from tests.integration.store_work.harness import Store
from tests.kit.store import our_errors

pytestmark = pytest.mark.integration


async def test_one_leads_and_the_other_waits(store: Store) -> None:
    first = await store.lead("a", ttl_ms=5_000)
    assert (first.leader, first.term, first.current_holder) == (True, 1, "a")
    other = await store.lead("b", ttl_ms=5_000)
    assert (other.leader, other.term, other.current_holder) == (False, 1, "a")
    assert 0 < other.left_ms <= 5_000

    store.clock.advance(4)
    assert (await store.lead("a", ttl_ms=5_000)).term == 1
    store.clock.advance(4)
    assert not (await store.lead("b")).leader
    store.clock.advance(1)
    taken = await store.lead("b")
    assert (taken.leader, taken.term) == (True, 2)
    assert not (await store.lead("a")).leader


async def test_a_stale_term_is_refused_on_every_call(store: Store) -> None:
    batch_id = await store.batch(2)
    await store.lead("a", ttl_ms=1_000)
    await store.window()
    store.clock.advance(1)
    with pytest.raises(StaleTermError):
        await store.window()

    await store.lead("b")
    for term in (0, 1, 3):
        store.term = term
        with pytest.raises(StaleTermError):
            await store.window()
    store.term = 2
    assert [batch.batch_id for batch in (await store.window()).batches] == [batch_id]


# Resigning says which term ends, and ends no other.
_FENCED = sorted(
    method.name
    for method in work_pb2.DESCRIPTOR.services_by_name["Work"].methods
    if "term" in method.input_type.fields_by_name and method.name != "Resign"
)


@pytest.mark.parametrize("method", _FENCED)
async def test_no_call_of_an_old_leader_is_served(store: Store, method: str) -> None:
    await store.lead("a", ttl_ms=1_000)
    store.clock.advance(1)
    await store.lead("b")

    async def call(term: int) -> None:
        request = getattr(work_pb2, f"{method}Request")(term=term)
        with our_errors():
            await getattr(store.work, method)(request, metadata=store.metadata)

    await call(2)
    for term in (0, 1, 3):
        with pytest.raises(StaleTermError):
            await call(term)
    store.clock.advance(60)
    with pytest.raises(StaleTermError):
        await call(2)


async def test_resigning_lets_a_standby_in_at_once(store: Store) -> None:
    await store.lead("a")
    for holder, term in (("b", 1), ("a", 7)):
        await store.work.Resign(
            work_pb2.ResignRequest(holder=holder, term=term), metadata=store.metadata
        )
    assert not (await store.lead("b")).leader
    await store.work.Resign(work_pb2.ResignRequest(holder="a", term=1), metadata=store.metadata)
    with pytest.raises(StaleTermError):
        await store.window()
    assert (await store.lead("b")).term == 2


async def test_a_stale_leader_cuts_and_reclaims_nothing(store: Store) -> None:
    batch_id = await store.batch(4)
    await store.lead("a")
    old = store.term
    store.clock.advance(60)
    await store.lead("b")
    with pytest.raises(StaleTermError), our_errors():
        await store.work.CutChunks(
            work_pb2.CutChunksRequest(
                term=old, cuts=[work_pb2.Cut(batch_id=batch_id, max_lines=4, max_bytes=1 << 20)]
            ),
            metadata=store.metadata,
        )
    with pytest.raises(StaleTermError), our_errors():
        await store.work.ReclaimChunks(
            work_pb2.ReclaimChunksRequest(term=old), metadata=store.metadata
        )
    assert (await store.window()).batches[0].lines_cut == 0
