"""What a check says while it runs: a JSON line for each kind of thing, fault, note and progress."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from json import JSONDecodeError
from typing import Final

import sqlalchemy as sa

from services.store.domain.checks.fault import Fault

Write = Callable[[dict[str, object]], None]
Render = Callable[[str], str]

MOST: Final = 200
"""Faults of one kind that are told; more are only counted."""
_PROGRESS_SECONDS: Final = 0.5

_UNREADABLE: Final = (
    "Stop nightshift and copy the whole directory first. Then restore nightshift.db from a backup, "
    "or save what can be read of it: sqlite3 nightshift.db .recover | sqlite3 recovered.db"
)


class Kind:
    """One kind of thing that is checked."""

    def __init__(self, name: str, write: Write, render: Render) -> None:
        """Begin to check things of this name."""
        self.name = name
        self._render = render
        self.faults = 0
        self._untold_lost = 0
        self._write = write
        self._counts: dict[str, int] = {}
        self._steps = 0
        self._told_at = time.monotonic()

    def count(self, label: str, number: int = 1) -> None:
        """Add to one of the numbers that are told of this kind, such as `live`."""
        self._counts[label] = self._counts.get(label, 0) + number

    def add(self, *faults: Fault) -> None:
        """Tell of faults."""
        for fault in faults:
            self.faults += 1
            if self.faults <= MOST:
                said = {**asdict(fault), "sql": self._render(fault.sql)}
                self._write({"event": "fault", "kind": self.name, **said})
            elif fault.blob:
                self._untold_lost += 1

    def extend(self, faults: Iterable[Fault]) -> None:
        """Tell of faults."""
        self.add(*faults)

    def note(self, text: str) -> None:
        """Tell of something that is no fault, and worth knowing."""
        self._write({"event": "note", "kind": self.name, "text": text})

    def step(self, steps: int = 1) -> None:
        """Say now and then how far it is."""
        self._steps += steps
        now = time.monotonic()
        if now - self._told_at >= _PROGRESS_SECONDS:
            self._told_at = now
            self._write({"event": "progress", "kind": self.name, "done": self._steps})

    def close(self) -> None:
        """Say what came of it."""
        self._write(
            {
                "event": "kind",
                "kind": self.name,
                "counts": self._counts,
                "faults": self.faults,
                "untold": max(0, self.faults - MOST),
                # Of these, those that are about a blob that is lost.
                "untold_lost": self._untold_lost,
            }
        )


class Report:
    """Everything that is checked.

    Attributes:
        faults: how many were found.
        is_whole: whether every kind was checked to its end.
    """

    def __init__(self, write: Write, render: Render = str) -> None:
        """Report through `write`, one object a call; `render` is given each statement to tell."""
        self._write = write
        self._render = render
        self.faults = 0
        self.is_whole = True

    @contextlib.contextmanager
    def kind(self, name: str) -> Iterator[Kind]:
        """Check things of one kind; where the database fails, that is the fault."""
        kind = Kind(name, self._write, self._render)
        try:
            yield kind
        except (sa.exc.DatabaseError, JSONDecodeError) as error:
            self.is_whole = False
            why = error.orig if isinstance(error, sa.exc.DatabaseError) else error
            what = f"cannot be read to its end: {why}"
            kind.add(Fault(subject="nightshift.db", what=what, mend=_UNREADABLE))
        kind.close()
        self.faults += kind.faults
