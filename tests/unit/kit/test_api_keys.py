"""A key with a wrong character is told from a good one without asking anybody."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.wire.api_keys import START, Form, form_of, new_key

pytestmark = pytest.mark.unit

ALPHABET = string.ascii_letters + string.digits + "-_"


@given(st.binary(min_size=32, max_size=32), st.data())
def test_each_wrong_character_shows(random: bytes, data: st.DataObject) -> None:
    key = new_key(random)
    assert form_of(key) is Form.CHECKED
    at = data.draw(st.integers(0, len(key) - 1))
    other = data.draw(st.sampled_from(ALPHABET).filter(lambda character: character != key[at]))
    assert form_of(key[:at] + other + key[at + 1 :]) is Form.MALFORMED
    assert form_of(key[:at] + key[at + 1 :]) is Form.MALFORMED
    assert form_of(key + other) is Form.MALFORMED


@pytest.mark.parametrize("text", ["", "none", START, "sk-" + "a" * 43, "ns-" + "a" * 43 + "\n"])
def test_no_key_is_malformed(text: str) -> None:
    assert form_of(text) is Form.MALFORMED


def test_a_key_of_the_form_before_is_known() -> None:
    assert form_of("ns-" + "a" * 43) is Form.OLD
