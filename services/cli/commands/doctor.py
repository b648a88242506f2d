"""`nightshift doctor`: what is so on this machine, and whether all in a directory is as it must be.

The check itself is the store's, in a process of its own: only the store knows its data.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

from services.cli.commands.machine_facts import Fact, gather
from services.cli.shared import store_job
from services.cli.shared.openai_client import INTERRUPTED, fail
from services.cli.shared.store_job import CANNOT, Said
from services.cli.up.command import DEFAULT_LISTEN
from services.cli.up.plan import PlanError, parse_address

WELL: Final = 0
FAULTS: Final = 1
DATABASE_URL: Final = "NIGHTSHIFT_STORE_DATABASE_URL"


@click.command()
@click.option(
    "--check",
    is_flag=True,
    help="Check all that stands in the directory instead, reading only, running or not.",
)
@click.option(
    "--deep",
    is_flag=True,
    help="With --check: read the content of every file too, which takes as long as reading it.",
)
@store_job.place_options
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=DEFAULT_LISTEN,
    show_default=True,
    help="Without --check: where it is to listen, if nothing runs on the directory.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def doctor(
    *,
    check: bool,
    deep: bool,
    data: Path,
    database_url: str | None,
    blobs_url: str | None,
    listen: str,
    as_json: bool,
) -> None:
    """Say what is so on this machine, or check all that a store keeps.

    Exits with 0 where all is well, 1 where something is wrong, and 2 where it could not be told.
    """
    if check or deep:
        settings = store_job.place(data, database_url, blobs_url)
        database = settings.get(DATABASE_URL, os.environ.get(DATABASE_URL))
        shown = _Json() if as_json else _Text(_program(database, data))
        sys.exit(_check(settings, deep, shown))
    try:
        facts = gather(data, parse_address("--listen", listen))
    except PlanError as error:
        fail(str(error), CANNOT)
    is_well = all(fact.is_well is not False for fact in facts)
    if as_json:
        print(json.dumps({"ok": is_well, "facts": [asdict(fact) for fact in facts]}))
    else:
        _print_facts(facts)
    sys.exit(WELL if is_well else FAULTS)


def _program(database: str | None, data: Path) -> str:
    """Return what runs a statement on a database; its address may hold a password."""
    if not database:
        return f"sqlite3 {data / 'nightshift.db'}"
    return "sqlite3 FILE" if database.startswith("sqlite") else "psql DATABASE -c"


def _print_facts(facts: list[Fact]) -> None:
    for fact in facts:
        print(f"{_mark(fact.is_well)} {fact.name:<12} {fact.text}")
        if fact.mend:
            print(f"  {'':<12} {fact.mend}")
    print("\n`nightshift doctor --check` checks what stands in the directory.")


def _mark(is_well: bool | None) -> str:
    marks = {True: "✓", False: "✗", None: "·"}
    try:
        "✓✗·".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        marks = {True: "+", False: "!", None: "-"}
    return marks[is_well]


# --- the check ------------------------------------------------------------------------------------


class _Json:
    """One object at the end."""

    def __init__(self) -> None:
        self._kinds: list[Said] = []
        self._faults: list[Said] = []
        self._notes: list[Said] = []

    def take(self, said: Said) -> None:
        lists = {"kind": self._kinds, "fault": self._faults, "note": self._notes}
        if said["event"] in lists:
            lists[said["event"]].append({k: v for k, v in said.items() if k != "event"})
        elif said["event"] == "again":
            for each in lists.values():
                each.clear()

    def end(self, status: int, why: str) -> None:
        whole: Said = {"ok": status == WELL}
        if status == CANNOT:
            whole["error"] = why
        else:
            whole |= {"kinds": self._kinds, "faults": self._faults, "notes": self._notes}
        print(json.dumps(whole))


class _Text:
    """A line for each kind as it comes, then each fault with its mend."""

    def __init__(self, program: str) -> None:
        """Show it; `program` runs a statement on what is checked."""
        self._program = program
        self._faults: list[Said] = []
        self._notes: list[str] = []
        self._count = 0
        self._draws = sys.stderr.isatty()

    def take(self, said: Said) -> None:
        actions: Mapping[str, Callable[[Said], None]] = {
            "kind": self._kind,
            "fault": self._faults.append,
            "note": self._note,
            "progress": self._progress,
            "again": self._again,
        }
        if said["event"] in actions:
            actions[said["event"]](said)

    def _kind(self, said: Said) -> None:
        self._count += said["faults"]
        counts = ", ".join(f"{number:,} {label}" for label, number in said["counts"].items())
        faults = f"{said['faults']:,} at fault" if said["faults"] else ""
        self._erase()
        text = "; ".join(filter(None, (counts or "none", faults)))
        print(f"{_mark(not said['faults'])} {said['kind']:<14} {text}", flush=True)
        if said["untold"]:
            self._notes.append(f"of {said['kind']}, {said['untold']:,} more faults are not told")

    def _note(self, said: Said) -> None:
        self._notes.append(f"{said['kind']}: {said['text']}")

    def _progress(self, said: Said) -> None:
        if self._draws:
            self._erase()
            print(f"  {said['kind']}: {said['done']:,} …", end="", file=sys.stderr, flush=True)

    def _erase(self) -> None:
        if self._draws:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _again(self, _said: Said) -> None:
        self._faults.clear()
        self._notes.clear()
        self._count = 0
        self._erase()
        print("a store was started meanwhile; once more:", flush=True)

    def end(self, status: int, why: str) -> None:
        self._erase()
        if status == CANNOT:
            print(f"nightshift doctor: {why}", file=sys.stderr)
            return
        for note in self._notes:
            print(f"{_mark(None)} {note}")
        for fault in self._faults:
            subject = f"{fault['subject']}: " if fault["subject"] else ""
            print(f"\n{_mark(False)} {subject}{fault['what']}")
            print(f"  mend: {fault['mend']}")
            if fault["sql"]:
                print(f"  statement: {fault['sql']}")
        if any(fault["sql"] for fault in self._faults):
            print(f'\nStatements are run with: {self._program} "STATEMENT"')
        print("\nall is well" if status == WELL else f"\n{self._count:,} faults")


def _check(settings: Mapping[str, str], deep: bool, shown: _Json | _Text) -> int:
    """Have the store's own code check a store; show what it says and return its status."""
    why = "the check itself failed; standard error says why"

    def take(said: Said) -> None:
        nonlocal why
        why = said.get("why", why)
        shown.take(said)

    arguments = ["services.store.checkup.doctor", *(["--deep"] if deep else [])]
    status = store_job.run(arguments, settings, take)
    if status == INTERRUPTED:
        return status
    if status not in (WELL, FAULTS):
        status = CANNOT
    shown.end(status, why)
    return status
