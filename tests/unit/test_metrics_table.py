"""The metrics that the page on operations lists are those that the services have."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "operations.md"
KINDS = {f"prometheus_client.{kind}" for kind in ("Counter", "Gauge", "Histogram", "Summary")}


def metrics(source: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each metric that a module makes, and its labels."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in KINDS:
            name, _, *labels = [ast.literal_eval(argument) for argument in node.args]
            yield name, labels[0] if labels else []


def test_each_is_listed_with_its_labels_and_no_other() -> None:
    section = TABLE.read_text().partition("## Metrics\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(nightshift_\w+)` \| \w+ \| (.*) \|$", section, re.MULTILINE)
    listed = {name: set(re.findall(r"`(\w+)`", what)) for name, what in rows}
    sources = (file.read_text() for file in sorted((ROOT / "services").rglob("*.py")))
    made = {
        name: set(labels)
        for source in sources
        if "prometheus_client" in source
        for name, labels in metrics(source)
    }
    assert listed == made
