"""A stranger finds a module: no folder holds many, and none is long."""

from collections import Counter
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.unit

SERVICES: Final = Path(__file__).resolve().parents[2] / "services"
MOST_MODULES: Final = 14
MOST_LINES: Final = 400
RELEASED: Final = SERVICES / "store" / "migrations" / "versions"
"""Migrations stay as they were released."""


def modules() -> list[Path]:
    return [each for each in SERVICES.rglob("*.py") if RELEASED not in each.parents]


def test_no_folder_has_more_modules_than_one_can_overlook() -> None:
    found = Counter(each.parent for each in modules() if each.name != "__init__.py")
    assert {str(folder): n for folder, n in found.items() if n > MOST_MODULES} == {}


def test_no_module_is_long() -> None:
    lengths = {str(each): len(each.read_text().splitlines()) for each in modules()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_each_room_says_what_lives_there() -> None:
    """A package has a docstring, but for the services themselves, which have a README line."""
    rooms = [each for each in SERVICES.rglob("__init__.py") if each.parent.parent != SERVICES]
    empty = [str(each) for each in rooms if not each.read_text().startswith('"""')]
    assert [each for each in empty if "migrations" not in each and each != str(SERVICES)] == []
