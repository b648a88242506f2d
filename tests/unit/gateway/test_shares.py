"""Shares of slots: nobody holds so many that others find none."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.auth import Caller
from services.gateway.shares import Shares, holder_of
from services.kit.wire.errors import RateLimitedError
from services.kit.wire.ids import ProjectId

pytestmark = pytest.mark.unit


def caller(project: str = "p", key: str | None = "k", client: str = "192.0.2.1") -> Caller:
    return Caller(project_id=ProjectId(project), request_id="r", key_id=key, client=client)


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from("abcd"), st.booleans())))
def test_whoever_comes_finds_a_slot_while_one_is_free(
    most: int, steps: list[tuple[str, bool]]
) -> None:
    shares, held = Shares(most), Counter[str]()
    for holder, takes in steps:
        if takes and shares.may_take(holder):
            shares.take(holder)
            held[holder] += 1
        elif not takes and held[holder]:
            shares.give_back(holder)
            held[holder] -= 1
        assert shares.taken == held.total() <= most
        assert shares.may_take("newcomer") == (held.total() < most)
    # One that takes all it may leaves as much to others, unless they have it already.
    while shares.may_take("a"):
        shares.take("a")
    assert most - shares.taken <= max(held["a"], (most - held.total() + held["a"] + 1) // 2)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_those_who_all_want_all_get_as_much(count: int) -> None:
    shares, got = Shares(240), Counter[str]()
    for turn in range(1_000):
        holder = f"holder {turn % count}"
        if shares.may_take(holder):
            shares.take(holder)
            got[holder] += 1
    assert set(got.values()) == {240 // (count + 1)}


def test_the_refusal_names_the_share() -> None:
    shares = Shares(2)
    with shares.held(caller(), "uploads"):
        with pytest.raises(RateLimitedError, match="You have 1 uploads running") as error:
            shares.held(caller(), "uploads").__enter__()
        assert error.value.retry_after_seconds == 1
        with shares.held(caller("other"), "uploads"):
            assert shares.taken == 2
    assert shares.taken == 0


def test_without_keys_addresses_count() -> None:
    assert holder_of(caller(client="192.0.2.7")) == "project p"
    assert holder_of(caller(key=None)) == "192.0.2.1"
    one, same, other = "2001:db8:1:2::1", "2001:db8:1:2:ffff::9", "2001:db8:1:3::1"
    named = [holder_of(caller(key=None, client=each)) for each in (one, same, other)]
    assert named[0] == named[1] != named[2]
