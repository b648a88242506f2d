"""The count of what is published and not yet opened."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.wire.ids import ChunkId, PoolId
from services.scheduler.domain.unopened import FORGET_SECONDS, Unopened

pytestmark = pytest.mark.unit

POOL = PoolId("a-1")


def key(chunk: int, number: int = 1) -> tuple[ChunkId, int]:
    return ChunkId(f"chunk_{chunk}"), number


@given(st.lists(st.tuples(st.sampled_from(["add", "open"]), st.integers(0, 9))))
def test_counts_what_was_added_and_not_opened(steps: list[tuple[str, int]]) -> None:
    ledger = Unopened()
    expected: dict[int, int] = {}
    for what, chunk in steps:
        if what == "add":
            ledger.add(POOL, key(chunk), lines=chunk + 1, now=0)
            expected[chunk] = chunk + 1
        else:
            ledger.opened(POOL, key(chunk))
            expected.pop(chunk, None)
        assert ledger.lines(POOL, 100) == sum(expected.values())


def test_what_the_broker_delivered_long_ago_counts_no_more() -> None:
    ledger = Unopened()
    for chunk in range(5):
        ledger.add(POOL, key(chunk), lines=10, now=chunk)
    # Three are delivered: chunks 0 and 1 long ago, chunk 2 a moment ago.
    ledger.correct(POOL, 2, 2 + FORGET_SECONDS)
    assert ledger.lines(POOL, 100) == 30
    ledger.correct(POOL, 0, 100)
    assert ledger.lines(POOL, 100) == 0


def test_messages_of_a_former_leader_take_room_too() -> None:
    ledger = Unopened()
    ledger.correct(POOL, 3, 0)
    assert ledger.lines(POOL, 16) == 48
    ledger.add(POOL, key(1), lines=5, now=1)
    ledger.correct(POOL, 2, 2)
    assert ledger.lines(POOL, 16) == 5 + 16
    ledger.clear()
    assert ledger.lines(POOL, 16) == 0
