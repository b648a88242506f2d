"""Event ids say where a stream stands, and nothing else is taken for one."""

import pytest

from services.store.domain.event_cursor import START, CursorError, InFile, Live, parse

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "cursor"),
    [
        ("", START),
        ("0", START),
        ("12", Live(13)),
        ("12.5", Live(12, 5)),
        ("12.5.80", Live(12, 5, 80)),
        ("12.0.80", Live(12, 0, 80)),
        ("o0", InFile("output")),
        ("e900", InFile("error", 900)),
        ("n7", InFile("never_ran", 7)),
    ],
)
def test_an_id_is_a_place(text: str, cursor: Live | InFile) -> None:
    assert parse(text) == cursor
    assert str(cursor) == (text or "0")


def test_what_a_place_has_told() -> None:
    assert Live(13).told == 12
    assert Live(13, 2).told == 12


@pytest.mark.parametrize(
    "text",
    [
        "-1",
        "1.",
        ".1",
        "1.2.3.4",
        "x1",
        "o",
        "o1.2",
        "1e3",
        " 1",
        "1\n",
        "٣",
        "0.1",
        "9" * 16,
        "a" * 99,
    ],
)
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(CursorError):
        parse(text)
