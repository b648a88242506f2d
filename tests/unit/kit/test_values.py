"""Values are counted exactly, without being built, wherever a text is cut into windows."""

import json
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.kit.wire import values
from services.kit.wire.values import MOST_NUMBERS, MOST_VALUES, too_many_values

pytestmark = pytest.mark.unit

texts = st.text(st.sampled_from('\\",{[]}: 1é\n😀'), max_size=6)
any_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int]:
    """Entries of all containers but for numbers in arrays, and those, found by building all."""
    if not isinstance(value, (list, dict)):
        return 0, 0
    inner = list(value.values() if isinstance(value, dict) else value)
    numbers = 0
    if isinstance(value, list):
        numbers = sum(isinstance(one, (int, float)) and type(one) is not bool for one in inner)
    below = [counted(one) for one in inner]
    own = max(1, len(inner)) - numbers
    return own + sum(pair[0] for pair in below), numbers + sum(pair[1] for pair in below)


@given(any_values, st.booleans(), st.sampled_from([None, 1]), st.integers(1, 9) | st.just(65_536))
@example([1, -1.5, [2], {"a": 3, "\\": [[]]}, '\\"', True], False, None, 1)
def test_values_are_counted_as_they_are(
    value: Any, ascii_only: bool, indent: int | None, window: int
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    found, numbers = counted(value)

    def refused(most_values: int, most_numbers: int) -> bool:
        # Such short texts are else not told from their quotes.
        with mock.patch.object(values, "_STRING_BYTES", window % 2 or 65_536):
            return too_many_values(
                text, most_values=most_values, most_numbers=most_numbers, window_bytes=window
            )

    assert not refused(found, numbers)
    assert found == 0 or refused(found - 1, numbers)
    assert numbers == 0 or refused(0, numbers - 1)


def test_the_bounds_are_what_they_say() -> None:
    def entries(one: bytes, count: int) -> bytes:
        return b"[" + b",".join([one] * count) + b"]"

    # Each empty object is an entry, and counts as holding one.
    assert not too_many_values(entries(b"{}", MOST_VALUES // 2))
    assert too_many_values(entries(b"{}", MOST_VALUES // 2 + 1))
    assert not too_many_values(entries(b'",{["', MOST_VALUES))
    assert too_many_values(entries(b'"\\""', MOST_VALUES + 1))
    assert not too_many_values(entries(b"17", MOST_NUMBERS))
    assert too_many_values(entries(b"17", MOST_NUMBERS + 1))
    assert not too_many_values(b'"' + b",{[" * MOST_VALUES + b'"')
