"""What is read of an Authorization header, and what of a wrong key is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.keys import key_of, masked


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("", ""),
        ("Bearer", ""),
        ("Bearer ", ""),
        ("Bearer ns-1", "ns-1"),
        ("bearer   ns-1 ", "ns-1"),
        ("BEARER ns-1", "ns-1"),
        ("Basic bnMtMQ==", ""),
        ("ns-1", ""),
    ],
)
def test_a_key_is_a_bearer_token(header: str, key: str) -> None:
    assert key_of(header) == key


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("short", "********"),
        ("123456789012345", "********"),
        ("ns-56789012WXYZ56", "ns-********YZ56"),
        ("é\x00\x1b3456789012345", "???********2345"),
    ],
)
def test_a_wrong_key_is_masked(key: str, shown: str) -> None:
    assert masked(key) == shown


@given(st.text(min_size=1))
def test_a_masked_key_is_never_the_key(key: str) -> None:
    assert key not in masked(key) or set(key) == {"*"} or len(key) < 4
    assert masked(key).isprintable()
    assert sum(c != "*" for c in masked(key)) <= 7
