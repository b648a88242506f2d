"""Files in the blob directory against rows: who names them, and what nobody names."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
import xxhash

from services.store.blobs.base import BlobUnreadableError
from services.store.blobs.reader import is_name
from services.store.checkup.report import Kind
from services.store.checkup.rows_read import View
from services.store.cleaning.sweeper import ABANDONED_SECONDS
from services.store.domain.checks import statement
from services.store.domain.checks.fault import Fault
from services.store.tables.core import blobs

PAGE: Final = 500
_MOST_UNKNOWN: Final = 100_000
_BY_HAND: Final = "Stop nightshift, run the statement, and check again."

Row = sa.Row[*tuple[Any, ...]]
T = TypeVar("T")
_Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a row says of a blob that it names.

    Attributes:
        subject: id of who names it.
        role: what the blob is to it, such as `its line index`.
        name: of the blob.
        project_id: whose it is.
        size: in bytes, where it is known; `least` where only that is.
        mend: what to do where the file is gone and no backup has it.
        sql: a statement that belongs to it.
        derived: whether the store makes it again by itself.
    """

    subject: str
    role: str
    name: str
    project_id: str
    size: int | None = None
    least: int = 0
    mend: str
    sql: str = ""
    derived: bool = False


def unreadable(subject: str, error: BlobUnreadableError) -> Fault:
    """Return what is told of a blob that is there and is not given."""
    return Fault(
        subject=subject,
        what=f"needs blobs/{error.name}, which cannot be read: {error.why}",
        mend="See whether its disk is well, and whether the store may read it. Where it never "
        "comes back, move it away: it counts as lost then, and this check says what to do.",
        blob=error.name,
    )


class NameSet:
    """Names of blobs, eight bytes each."""

    def __init__(self) -> None:
        """Begin with none."""
        self._chunks: list[_Hashes] = []

    def add(self, names: Iterable[str]) -> None:
        """Add names."""
        self._chunks.append(_hashes(names))

    def hashes(self) -> _Hashes:
        """Return all, sorted, each once."""
        if len(self._chunks) != 1:
            joined = np.concatenate(self._chunks) if self._chunks else np.zeros(0, np.uint64)
            self._chunks = [np.unique(joined)]
        return self._chunks[0]

    def lacks(self, names: Sequence[str]) -> list[str]:
        """Return those of these names that are not in it."""
        inside = np.isin(_hashes(names), self.hashes())
        return [name for name, known in zip(names, inside.tolist(), strict=True) if not known]


def _hashes(names: Iterable[str]) -> _Hashes:
    return np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], np.uint64)


class Blobs:
    """What is known of blobs while those who name them are looked at one after the other.

    The directory is read first, then the blobs' rows, then all that names blobs: whatever is live
    in the first reading is named in the last, unless something is wrong or it was dropped in
    between, which a look at the single row tells.
    """

    def __init__(self, view: View) -> None:
        """Look at the blobs of `view`."""
        self._view = view
        self.named = NameSet()
        self._unknown: list[str] = []
        self._live = NameSet()
        self._now_ms = int(time.time() * 1000)

    def look(self, kind: Kind) -> None:
        """Read the directory and the rows of blobs."""
        for page in _paged(self._view.blobs.names()):
            kind.step(len(page))
            kind.count("files", len(page))
            kind.count("bytes", sum(size for _, size in page))
            with self._view.snapshot() as connection:
                known = states(connection, [name for name, _ in page])
            room = _MOST_UNKNOWN - len(self._unknown)
            self._unknown += [name for name, _ in page if name not in known][:room]
        old_ms = self._now_ms - ABANDONED_SECONDS * 1000
        for rows in self._rows():
            kind.step(len(rows))
            live = [row.name for row in rows if row.state == "live"]
            self._live.add(live)
            kind.count("live", len(live))
            pending = [row for row in rows if row.state == "pending"]
            kind.count("being written", sum(row.created_ms >= old_ms for row in pending))
            kind.count("abandoned", sum(row.created_ms < old_ms for row in pending))
            kind.count("to be deleted", len(rows) - len(live) - len(pending))

    def _rows(self) -> Iterator[Sequence[Row]]:
        last = ""
        while True:
            with self._view.snapshot() as connection:
                rows = connection.execute(
                    sa.select(blobs.c.name, blobs.c.state, blobs.c.created_ms)
                    .where(blobs.c.name > last)
                    .order_by(blobs.c.name)
                    .limit(PAGE)
                ).all()
            if not rows:
                return
            yield rows
            last = rows[-1].name

    # --- those that are named --------------------------------------------------------------------

    def faults(self, claims: Sequence[Claim], known: dict[str, str]) -> Iterator[Fault]:
        """Check blobs that rows name; `known` are their `states` in the snapshot of these rows."""
        self.named.add(claim.name for claim in claims)
        for claim in claims:
            state = known.get(claim.name)
            fault = self._file_fault(claim)
            if fault is not None and state == "live" and not self.is_live(claim.name):
                continue
            if fault is None and state != "live":
                fault = self._row_fault(claim, state)
            if fault is not None:
                yield fault

    def _file_fault(self, claim: Claim) -> Fault | None:
        backup = f"Restore blobs/{claim.name} from a backup. Without one: {claim.mend}"
        if not is_name(claim.name):
            what = f"names {claim.name!r} as {claim.role}, which no blob is called"
            return Fault(subject=claim.subject, what=what, mend=claim.mend, sql=claim.sql)
        size = self._view.blobs.size(claim.name)
        if size is None:
            what = f"{claim.role}, blobs/{claim.name}, is gone"
            return Fault(
                subject=claim.subject, what=what, mend=backup, sql=claim.sql, blob=claim.name
            )
        wanted = claim.least if claim.size is None else claim.size
        if size < wanted or (claim.size is not None and size > wanted):
            what = f"{claim.role}, blobs/{claim.name}, has {size} bytes instead of {wanted}"
            return Fault(
                subject=claim.subject, what=what, mend=backup, sql=claim.sql, blob=claim.name
            )
        return None

    def _row_fault(self, claim: Claim, state: str | None) -> Fault:
        """A blob whose file is there and whose row would have it deleted, or never says so."""
        if state is None:
            return Fault(
                subject=claim.subject,
                what=f"{claim.role}, blobs/{claim.name}, has no row of its own",
                mend=_BY_HAND,
                sql=statement.insert(
                    "blobs",
                    {"name": claim.name},
                    project_id=claim.project_id,
                    state="live",
                    created_ms=self._now_ms,
                ),
            )
        return Fault(
            subject=claim.subject,
            what=f"{claim.role}, blobs/{claim.name}, is {state} by its row: the store's sweeper"
            " deletes it",
            mend="Stop nightshift at once, run the statement, and check again.",
            sql=statement.update("blobs", {"name": claim.name}, state="live"),
        )

    def is_live(self, name: str) -> bool:
        """Tell whether a blob is in use by its row as it is now."""
        with self._view.snapshot() as connection:
            return states(connection, [name]).get(name) == "live"

    # --- those that are not ----------------------------------------------------------------------

    def judge(self, kind: Kind) -> None:
        """Report what nothing names, once all that names blobs was looked at."""
        for name in self.named.lacks(self._unknown):
            with self._view.snapshot() as connection:
                known = states(connection, [name])
            if name not in known and self._view.blobs.size(name) is not None:
                kind.add(
                    Fault(
                        subject=f"blobs/{name}",
                        what="is a file that no row knows, and takes room",
                        mend="Move it away, and delete it once you know that nobody wants it.",
                    )
                )
        loose = set(np.setdiff1d(self._live.hashes(), self.named.hashes()).tolist())
        if loose:
            self._judge_loose(kind, loose)
        unfinished = self._view.blobs.unfinished()
        if unfinished:
            kind.note(
                f"{unfinished} files in blobs/tmp are being written, or will be removed by"
                " the store's next start"
            )

    def _judge_loose(self, kind: Kind, loose: set[int]) -> None:
        for rows in self._rows():
            for row in rows:
                if xxhash.xxh3_64_intdigest(row.name.encode()) not in loose:
                    continue
                if row.state == "live":
                    kind.add(
                        Fault(
                            subject=f"blobs/{row.name}",
                            what="is live, but no row names it: it takes room",
                            mend=_BY_HAND + " The sweeper deletes it then.",
                            sql=statement.update("blobs", {"name": row.name}, state="doomed"),
                        )
                    )


def states(connection: sa.Connection, names: Iterable[str]) -> dict[str, str]:
    """Return the states of these blobs, as far as they have rows."""
    found: dict[str, str] = {}
    for page in _paged(iter(names)):
        rows = connection.execute(
            sa.select(blobs.c.name, blobs.c.state).where(blobs.c.name.in_(page))
        )
        found.update((row.name, row.state) for row in rows)
    return found


def _paged(items: Iterator[T]) -> Iterator[list[T]]:
    page: list[T] = []
    for item in items:
        page.append(item)
        if len(page) == PAGE:
            yield page
            page = []
    if page:
        yield page
