"""`python -m benchmarks [NAME…] [--json FILE]`: measure, and print one table."""

import importlib
import signal
import sys
import traceback
from pathlib import Path
from typing import Final

import click

from benchmarks.processes import describe_machine
from benchmarks.report import Row, print_table, write_json
from benchmarks.workshop import Workshop

# In this order: what wants a quiet machine first; the two that share one vLLM system last.
NAMES: Final = (
    "standby",
    "one_line",
    "intake",
    "listing",
    "pipeline",
    "commits",
    "growth",
    "upload_parts",
    "faults",
    "neighbours",
    "recovery",
    "engine_full",
    "one_at_a_time",
)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES), metavar="[NAME]...")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the figures to this file.",
)
def main(names: tuple[str, ...], json_file: Path | None) -> None:
    """Measure each NAME (all without any) and print one table.

    docs/benchmarks.md says what each means. Progress goes to standard error. The exit status is
    1 where a benchmark could not be run; a figure that misses its budget is said in the table.
    """
    # What was started is to end with us, however we are told to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows: list[Row] = []
    broken = []
    machine = describe_machine()
    with Workshop() as workshop:
        for name in (one for one in NAMES if not names or one in names):
            workshop.say(f"--- {name}")
            module = importlib.import_module(f"benchmarks.{name}")
            try:
                rows.extend(module.measure(workshop))
            except Exception:  # noqa: BLE001 - the other figures are worth having
                traceback.print_exc()
                broken.append(name)
    print_table(rows, machine)
    if json_file is not None:
        write_json(rows, machine, json_file)
    if broken:
        print(f"could not be run: {', '.join(broken)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
