"""The list of the contract's numbers is read off the tests, and a number without one is told."""

from pathlib import Path

import pytest

from tools.contract_numbers import (
    NUMBERS,
    TESTS,
    MisplacedTagError,
    named_in,
    numbers_of,
)

pytestmark = pytest.mark.unit

SOURCE = """
# contract: 7
def test_plain() -> None:
    # contract of another kind
    pass


# Why it is so.
# contract: 8, 9
@pytest.mark.parametrize(
    "x",
    [
        # contract: 10
        1,
    ],
)
# contract: 11
async def test_decorated() -> None:
    pass


def test_none() -> None:
    pass
"""


def test_tags_are_those_right_above() -> None:
    assert numbers_of(SOURCE, "x") == {"test_plain": {7}, "test_decorated": {8, 9, 10, 11}}


@pytest.mark.parametrize(
    "source",
    [
        "# contract: 7\n\ndef test_far() -> None: ...\n",
        "# contract: 7\ndef helper() -> None: ...\n",
        "# contract: 7 and 8\ndef test_words() -> None: ...\n",
        "# contract:\ndef test_empty() -> None: ...\n",
        "# contract: 101\ndef test_beyond() -> None: ...\n",
        "def test_inside() -> None:\n    # contract: 7\n    pass\n",
    ],
)
def test_a_tag_that_would_count_for_nothing_is_told(source: str) -> None:
    with pytest.raises(MisplacedTagError):
        numbers_of(source, "x")


def test_tests_are_found_by_number(tmp_path: Path) -> None:
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    (tmp_path / "tests" / "deep" / "test_x.py").write_text(SOURCE)
    (tmp_path / "tests" / "helper.py").write_text("# contract: 1\n")
    found = named_in(tmp_path / "tests")
    assert found[7] == ["tests/deep/test_x.py::test_plain"]
    assert sorted(found) == [7, 8, 9, 10, 11]


def test_each_of_our_numbers_has_a_test() -> None:
    assert set(named_in(TESTS)) == set(NUMBERS)
