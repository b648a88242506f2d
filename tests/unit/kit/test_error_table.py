"""The table of errors in docs/api.md is that of the code."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.gateway.rest.envelope import error_headers
from services.kit.wire import errors
from services.kit.wire.errors import NightshiftError, RateLimitedError, all_error_classes

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
HEAD = "| HTTP | gRPC | type | codes | when | again |"


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    grpc: frozenset[str]
    type: str
    codes: frozenset[str]


Key = tuple[int, str]
"""Status, and whether it helps to try again: `yes` or `no`."""


def documented() -> dict[Key, Row]:
    """Return the table of the documentation."""
    lines = iter((ROOT / "docs/api.md").read_text().splitlines())
    assert HEAD in lines
    next(lines)
    rows = {}
    for line in lines:
        if not line.startswith("|"):
            break
        status, grpc, kind, codes, when, again = (cell.strip() for cell in line.split("|")[1:-1])
        assert when
        rows[int(status), again] = Row(
            frozenset(grpc.split(", ")),
            kind.strip("`"),
            frozenset(code.strip("`") for code in codes.split()),
        )
    return rows


def kinds() -> list[type[NightshiftError]]:
    """Return all classes of the code's table."""
    return list(all_error_classes())


def key_of(kind: type[NightshiftError]) -> Key:
    """Return where a class of the code's table stands in that of the documentation."""
    return kind.http_status, "yes" if kind.retryable else "no"


def codes_raised() -> Iterator[tuple[Key, str]]:
    """Return row and code of each error that gateway, store or their kit make with a code."""
    folders = (ROOT / "services" / name for name in ("gateway", "store", "kit"))
    for path in (file for folder in folders for file in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            kind = getattr(errors, node.func.id, None)
            if not (isinstance(kind, type) and issubclass(kind, NightshiftError)):
                continue
            for keyword in node.keywords:
                if keyword.arg == "code":
                    for part in ast.walk(keyword.value):
                        if isinstance(part, ast.Constant) and isinstance(part.value, str):
                            yield key_of(kind), part.value


def test_every_status_has_its_row() -> None:
    table = documented()
    assert set(table) == set(map(key_of, kinds()))
    for key, row in table.items():
        mine = [kind for kind in kinds() if key_of(kind) == key]
        assert row.grpc == {kind.grpc_code.name for kind in mine}, key
        assert {row.type} == {kind.type for kind in mine}, key


def test_every_code_stands_in_its_row() -> None:
    raised = defaultdict(set)
    for key, code in codes_raised():
        raised[key].add(code)
    assert {key: row.codes for key, row in documented().items() if row.codes} == raised


def test_clients_are_told_where_they_would_repeat_in_vain() -> None:
    # What the official clients repeat by themselves.
    repeated = [
        kind for kind in kinds() if kind.http_status in (408, 409, 429) or kind.http_status >= 500
    ]
    for kind in repeated:
        told = error_headers(kind("m")).get("x-should-retry")
        assert told == (None if kind.retryable else "false"), kind


@pytest.mark.parametrize(("seconds", "told"), [(60, None), (60.1, "false"), (3_600, "false")])
def test_a_long_wait_is_not_slept_through(seconds: float, told: str | None) -> None:
    headers = error_headers(RateLimitedError("m", retry_after_seconds=seconds))
    assert headers.get("x-should-retry") == told
    assert int(headers["retry-after"]) >= seconds
