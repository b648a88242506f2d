"""Ids sort by time, and whatever a pool is called, its id is a subject token of its own."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.wire import ids

pytestmark = pytest.mark.unit


def test_made_ids_are_hex_distinct_and_sort_by_time() -> None:
    made = [ids.uuid7_hex() for _ in range(2_000)]
    assert all(re.fullmatch(r"[0-9a-f]{32}", one) for one in made)
    assert len(set(made)) == len(made)
    assert made == sorted(made)
    assert {one[12] for one in made} == {"7"}


@pytest.mark.parametrize("text", ["batch_0123", "file-abc", "a", "A" * 128])
def test_what_can_be_an_id(text: str) -> None:
    assert ids.is_public_id(text)


@pytest.mark.parametrize(
    "text", ["", "a" * 129, "../etc/passwd", "a/b", "a.b", "batch_1\n", "é", "a b", "a\x00"]
)
def test_what_cannot_be_an_id(text: str) -> None:
    assert not ids.is_public_id(text)


@given(st.text())
def test_a_pool_id_is_a_subject_token_for_any_name(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9_-]{1,32}-[0-9a-f]{8}", ids.pool_id_of(name))
    assert ids.pool_id_of(name) == ids.pool_id_of(name)


@given(st.text(), st.text())
def test_pools_of_other_names_have_other_ids(one: str, other: str) -> None:
    assert (ids.pool_id_of(one) == ids.pool_id_of(other)) == (one == other)


def test_a_pool_id_stays_what_it_was() -> None:
    # It names a durable consumer: a release that computed it otherwise would lose its queue.
    assert ids.pool_id_of("Qwen/Qwen3-8B") == "qwen-qwen3-8b-a82fd547"
