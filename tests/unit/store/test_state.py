"""The drawing in docs/state_machine.md and the code are the same machine."""

import re
from pathlib import Path

import pytest

from services.store.domain import state
from services.store.domain.state import AlreadyThere, BatchStatus, Conflict, Moved

pytestmark = pytest.mark.unit

DOC = (Path(__file__).parents[3] / "docs" / "state_machine.md").read_text(encoding="utf-8")


def rows(*, columns: int) -> list[list[str]]:
    """The doc's table rows about a status that have this many columns, backticks removed."""
    cells = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        for line in DOC.splitlines()
        if line.startswith("| `")
    ]
    return [row for row in cells if len(row) == columns]


def test_drawing_equals_code() -> None:
    arrows = re.findall(r"^ +(\S+) --> (\S+)$", DOC, re.MULTILINE)
    drawn = {(a, b) for a, b in arrows if "[*]" not in (a, b)}
    coded = {(a.value, b.value) for a, targets in state.TRANSITIONS.items() for b in targets}
    assert drawn == coded
    assert {b for a, b in arrows if a == "[*]"} == {state.INITIAL.value}
    assert {a for a, b in arrows if b == "[*]"} == {s.value for s in state.TERMINAL}


def test_table_equals_code() -> None:
    table = rows(columns=5)
    assert {row[0] for row in table} == {s.value for s in BatchStatus}
    for name, entered_from, column, terminal, _ in table:
        status = BatchStatus(name)
        assert state.TIMESTAMP_COLUMN[status] == column
        assert (status in state.TERMINAL) == (terminal == "yes")
        expected = {s.value for s in state.sources(status)} or {"creation"}
        assert set(entered_from.split(", ")) == expected


def test_cancel_table_equals_code() -> None:
    table = rows(columns=3)
    assert {row[0] for row in table} == {s.value for s in BatchStatus}
    for name, answer, effect in table:
        match state.cancel(BatchStatus(name)):
            case Moved(target):
                assert (answer, effect) == ("200", f"moves to {target.value}")
            case AlreadyThere(status):
                assert (answer, effect, status.value) == ("200", "none", name)
            case Conflict(status, message):
                assert (answer, effect, status.value) == ("409", "none", name)
                assert message == f"Cannot cancel a batch with status '{name}'."


def test_every_status_ends() -> None:
    """From each status a terminal one is reached, and no cycle exists."""

    def walk(status: BatchStatus, path: frozenset[BatchStatus]) -> None:
        assert status not in path
        targets = state.TRANSITIONS[status]
        assert targets or status in state.TERMINAL
        for target in targets:
            walk(target, path | {status})

    walk(state.INITIAL, frozenset())


def test_timestamps_are_distinct() -> None:
    assert len(set(state.TIMESTAMP_COLUMN.values())) == len(BatchStatus)
