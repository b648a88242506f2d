"""Decisions under the default policy, held against a store that is simulated line by line."""

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kit.wire.ids import BatchId, PoolId
from services.scheduler.domain.capacity import Capacity
from services.scheduler.domain.chunker import MAX_CHUNK_BYTES, MAX_CHUNK_LINES, Cut
from services.scheduler.domain.decision import MOST_CUTS, State, decide
from services.scheduler.domain.policies.fifo import Fifo
from services.scheduler.domain.window import Window, WindowBatch

pytestmark = pytest.mark.unit

POOLS = [PoolId("a-1"), PoolId("b-2")]
NOW = 1_000


def capacity(room: int, *, rate: float = 0.0, seats: int = 64, executors: int = 1) -> Capacity:
    return Capacity(
        executors=executors,
        seats=seats,
        lines_per_second=rate,
        asked_lines=room,
        unopened_lines=0,
    )


capacities = st.builds(
    capacity,
    st.integers(0, 3_000),
    rate=st.floats(0, 100),
    seats=st.integers(1, 256),
    executors=st.integers(1, 4),
)


@dataclass
class SimulatedStore:
    """Holds the bytes of every line, and cuts as the store does."""

    line_bytes: dict[BatchId, list[int]] = field(default_factory=dict)
    cut_lines: dict[BatchId, int] = field(default_factory=lambda: defaultdict(int))
    pools: dict[BatchId, tuple[int, PoolId]] = field(default_factory=dict)

    def create(self, seq: int, pool: PoolId, line_bytes: list[int]) -> None:
        batch_id = BatchId(f"batch_{seq:06}")
        self.line_bytes[batch_id] = line_bytes
        self.pools[batch_id] = (seq, pool)

    def window(self) -> Window:
        return Window.of(
            WindowBatch(
                batch_id=batch_id,
                seq=self.pools[batch_id][0],
                pool_id=self.pools[batch_id][1],
                lines_total=len(sizes),
                lines_cut=self.cut_lines[batch_id],
                expires_at_ms=NOW + 1,
                line_bytes_mean=sum(sizes) // len(sizes),
            )
            for batch_id, sizes in self.line_bytes.items()
            if self.cut_lines[batch_id] < len(sizes)
        )

    def cut(self, wanted: Cut) -> tuple[BatchId, int, int] | None:
        """Return batch, first line and number of lines, or None where nothing is left."""
        sizes = self.line_bytes[wanted.batch_id]
        first = self.cut_lines[wanted.batch_id]
        lines = total = 0
        for size in sizes[first : first + wanted.max_lines]:
            if lines and total + size > wanted.max_bytes:
                break
            lines += 1
            total += size
        self.cut_lines[wanted.batch_id] += lines
        return (wanted.batch_id, first, lines) if lines else None

    def earlier_lines_left(self, batch_id: BatchId) -> int:
        seq, pool = self.pools[batch_id]
        return sum(
            len(self.line_bytes[other]) - self.cut_lines[other]
            for other, (other_seq, other_pool) in self.pools.items()
            if other_pool == pool and other_seq < seq
        )


sizes = st.one_of(
    st.integers(1, 300).map(lambda lines: [100] * lines),
    st.lists(st.integers(1, 9 * 1024**2), min_size=1, max_size=30),
)
arrivals = st.lists(st.tuples(st.sampled_from(POOLS), sizes), max_size=4)


@settings(deadline=None)
@given(st.lists(st.tuples(arrivals, st.tuples(capacities, capacities)), min_size=1, max_size=6))
def test_chunks_of_a_pool_leave_in_order_of_batch_and_line(
    turns: list[tuple[list[tuple[PoolId, list[int]]], tuple[Capacity, Capacity]]],
) -> None:
    store = SimulatedStore()
    seq = 0
    sent: dict[PoolId, list[tuple[int, int]]] = defaultdict(list)
    for arrived, rooms in turns:
        for pool, line_bytes in arrived:
            seq += 1
            store.create(seq, pool, line_bytes)
        state = State(store.window(), dict(zip(POOLS, rooms, strict=True)), Fifo())
        for wanted in decide(state, NOW):
            cut = store.cut(wanted)
            assert cut is not None, "no line is promised twice"
            batch_id, first, lines = cut
            assert lines <= MAX_CHUNK_LINES
            chunk_bytes = sum(store.line_bytes[batch_id][first : first + lines])
            assert lines == 1 or chunk_bytes <= MAX_CHUNK_BYTES
            assert store.earlier_lines_left(batch_id) == 0
            sent[store.pools[batch_id][1]].append((store.pools[batch_id][0], first))
    for chunks in sent.values():
        assert chunks == sorted(chunks)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 3_000), capacities)
def test_a_pool_gets_its_room_and_at_most_one_chunk_more(
    batches: int, lines: int, pool: Capacity
) -> None:
    store = SimulatedStore()
    for seq in range(batches):
        store.create(seq, POOLS[0], [10] * max(1, lines))
    cuts = decide(State(store.window(), {POOLS[0]: pool}, Fifo()), NOW)
    given_lines = sum(cut.max_lines for cut in cuts)
    assert given_lines - (cuts[-1].max_lines if cuts else 0) < max(1, pool.room)
    assert len(cuts) <= MOST_CUTS
    if len(cuts) < MOST_CUTS:
        assert given_lines >= min(pool.room, batches * max(1, lines))


def test_no_room_is_no_cut() -> None:
    store = SimulatedStore()
    store.create(1, POOLS[0], [1] * 100)
    full = Capacity(executors=1, seats=64, lines_per_second=0.0, asked_lines=88, unopened_lines=88)
    assert decide(State(store.window(), {POOLS[0]: full}, Fifo()), NOW) == []


def test_a_pool_without_room_blocks_no_other() -> None:
    store = SimulatedStore()
    store.create(1, POOLS[0], [1] * 100)
    store.create(2, POOLS[1], [1] * 100)
    state = State(store.window(), {POOLS[0]: capacity(0), POOLS[1]: capacity(10)}, Fifo())
    assert {cut.batch_id for cut in decide(state, NOW)} == {"batch_000002"}


def test_a_large_pool_leaves_cuts_for_a_small_one() -> None:
    store = SimulatedStore()
    store.create(1, POOLS[0], [1] * 50_000)
    store.create(2, POOLS[1], [1] * 10)
    state = State(store.window(), {POOLS[0]: capacity(50_000), POOLS[1]: capacity(10)}, Fifo())
    cuts = decide(state, NOW)
    assert len(cuts) == MOST_CUTS
    assert "batch_000002" in {cut.batch_id for cut in cuts}


def test_many_small_batches_leave_in_one_call() -> None:
    store = SimulatedStore()
    for seq in range(100):
        store.create(seq, POOLS[0], [1_000])
    cuts = decide(State(store.window(), {POOLS[0]: capacity(40)}, Fifo()), NOW)
    assert [cut.batch_id for cut in cuts] == [f"batch_{seq:06}" for seq in range(40)]


def test_a_batch_past_its_time_is_passed_over() -> None:
    store = SimulatedStore()
    store.create(1, POOLS[0], [1])
    assert decide(State(store.window(), {POOLS[0]: capacity(10)}, Fifo()), NOW + 1) == []


def test_behind_a_batch_whose_cuts_may_come_out_short_nothing_is_cut_at_once() -> None:
    """Its lines go first; the store says what is left."""
    mixed, later = (
        WindowBatch(
            batch_id=BatchId(f"batch_{seq}"),
            seq=seq,
            pool_id=POOLS[0],
            lines_total=10,
            lines_cut=0,
            expires_at_ms=NOW + 1,
            line_bytes_mean=10,
            several_models=seq == 1,
        )
        for seq in (1, 2)
    )
    state = State(Window.of([mixed, later]), {POOLS[0]: capacity(100)}, Fifo())
    assert {cut.batch_id for cut in decide(state, NOW)} == {"batch_1"}
    state = State(Window.of([later]), {POOLS[0]: capacity(100)}, Fifo())
    assert {(cut.pool_id, cut.batch_id) for cut in decide(state, NOW)} == {(POOLS[0], "batch_2")}
