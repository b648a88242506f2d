"""Turns: a bounded number a second, to projects in turn, in order within each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.domain.turns import Turns

pytestmark = pytest.mark.unit


def test_a_project_with_many_holds_up_no_other() -> None:
    turns: Turns[str] = Turns(per_second=10, burst=2)
    for number in range(500):
        turns.ask("many", f"m{number}")
    turns.ask("one", "o")
    assert list(turns.given(0)) == ["m0", "o"]
    turns.ask("one", "p")
    assert turns.next_in() == pytest.approx(0.1)
    assert list(turns.given(0.05)) == []
    assert [*turns.given(0.11), *turns.given(0.21)] == ["m1", "p"]
    # A second, and what is over of a turn.
    assert list(turns.given(1.22)) == ["m2", "m3"]


def test_who_leaves_takes_no_turn() -> None:
    turns: Turns[str] = Turns(per_second=1, burst=1)
    for one in "abc":
        turns.ask("p", one)
    turns.leave("p", "a")
    assert list(turns.given(0)) == ["b"]
    turns.leave("p", "c")
    turns.leave("q", "nobody")
    assert (turns.next_in(), turns.all()) == (None, [])


@given(
    asked=st.lists(st.sampled_from("abc"), min_size=1, max_size=40),
    pauses=st.lists(st.floats(0, 2), max_size=20),
)
def test_all_get_their_turn_in_order_and_no_more_a_second(
    asked: list[str], pauses: list[float]
) -> None:
    turns: Turns[int] = Turns(per_second=5, burst=3)
    for number, project in enumerate(asked):
        turns.ask(project, number)
    now, got = 0.0, list(turns.given(0))
    for pause in pauses:
        now += pause
        got += turns.given(now)
        assert len(got) <= 3 + 5 * now
    while (seconds := turns.next_in()) is not None:
        now += seconds + 1e-6
        got += turns.given(now)
    assert sorted(got) == list(range(len(asked)))
    for project in "abc":
        mine = [number for number in got if asked[number] == project]
        assert mine == sorted(mine)
        # Nobody else has two turns between two of one project that waits.
        for other in set("abc") - {project}:
            last = max((got.index(number) for number in mine), default=0)
            between = [asked[number] for number in got[:last]]
            assert between.count(other) <= between.count(project) + 1
