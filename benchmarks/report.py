"""What a benchmark hands back, and the one table that is printed of it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured figure.

    Attributes:
        bench: the benchmark it belongs to.
        what: what was measured.
        value: the figure.
        unit: its unit; empty for a ratio.
        budget: what it is to be, such as `>= 0.90`; empty where there is none.
        met: whether it is; None without a budget.
        detail: the single measurements and what else is needed to judge the figure.
    """

    bench: str
    what: str
    value: float
    unit: str = ""
    budget: str = ""
    met: bool | None = None
    detail: str = ""


def at_least(bench: str, what: str, value: float, bound: float, **rest: Any) -> Row:
    """Return a row that is met from `bound` upwards; `also` names a further goal."""
    return _bounded(bench, what, value, f">= {bound:,g}", value >= bound, **rest)


def at_most(bench: str, what: str, value: float, bound: float, **rest: Any) -> Row:
    """Return a row that is met up to `bound`; `also` names a further goal."""
    return _bounded(bench, what, value, f"<= {bound:,g}", value <= bound, **rest)


def _bounded(
    bench: str, what: str, value: float, budget: str, met: bool, *, also: str = "", **rest: Any
) -> Row:
    return Row(
        bench=bench,
        what=what,
        value=value,
        budget=f"{budget} ({also})" if also else budget,
        met=met,
        **rest,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` % of all do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def number(value: float) -> str:
    """Write a figure with three significant digits, or whole from 1,000 on."""
    if abs(value) >= 1_000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def print_table(rows: Sequence[Row], machine: str) -> None:
    """Print all rows on standard output, the machine above them."""
    table = Table(title=machine, title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("benchmark", no_wrap=True)
    table.add_column("what")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("budget")
    table.add_column("met", no_wrap=True)
    table.add_column("detail", overflow="fold")
    last = ""
    for row in rows:
        if last and row.bench != last:
            table.add_section()
        table.add_row(
            row.bench if row.bench != last else "",
            row.what,
            f"{number(row.value)} {row.unit}".strip(),
            row.budget,
            "" if row.met is None else ("yes" if row.met else "NO"),
            row.detail,
        )
        last = row.bench
    console = Console()
    # A file or a pipe has no width of its own; rows are to stay whole there.
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


def write_json(rows: Sequence[Row], machine: str, file: Path) -> None:
    """Write the same for programs."""
    found = {"machine": machine, "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(found, indent=2) + "\n")
