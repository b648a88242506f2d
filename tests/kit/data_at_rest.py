"""A store's directory that lies still, half-way through its work, to be damaged and checked."""

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.store.checkup import doctor
from services.store.settings import StoreSettings
from tests.integration.store_work.harness import Store, running
from tests.kit import uploads
from tests.kit.store import chat_line

OPEN_LINES = 10
ENDED_LINES = 5
LONG_ANSWER = "x" * 100_000


@dataclass(frozen=True)
class Found:
    """What a check said."""

    faults: list[dict[str, Any]] = field(default_factory=list)
    kinds: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def statements(self) -> list[str]:
        """The statements that it would have run."""
        return [fault["sql"] for fault in self.faults if fault["sql"]]

    def of(self, kind: str) -> list[str]:
        """What is wrong with things of a kind."""
        return [
            f"{each['subject']}: {each['what']}" for each in self.faults if each["kind"] == kind
        ]


def check(data: Path, *, deep: bool = False) -> Found:
    """Check a directory in this process, as `python -m services.store.checkup.doctor` does."""
    said: list[dict[str, Any]] = []
    count = doctor.check(StoreSettings(data_dir=data), said.append, deep=deep)
    found = Found()
    for each in said:
        if each["event"] == "fault":
            found.faults.append(each)
        elif each["event"] == "kind":
            found.kinds[each["kind"]] = each
        elif each["event"] == "note":
            found.notes.append(each["text"])
    assert count == len(found.faults)
    return found


@dataclass(frozen=True)
class Data:
    """The directory and the names in it. It is the test's own copy."""

    root: Path
    open_batch: str
    ended_batch: str
    upload: str

    def copy(self, to: Path) -> "Data":
        """Return it again, below another folder."""
        shutil.copytree(self.root, to)
        return Data(to, self.open_batch, self.ended_batch, self.upload)

    def sql(self, statement: str, *values: object) -> list[Any]:
        """Run a statement that no store would."""
        # Closed again, so that nothing of it is left beside the database.
        with contextlib.closing(sqlite3.connect(self.root / "nightshift.db")) as connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            rows = connection.execute(statement, values).fetchall()
            connection.commit()
        return rows

    def one(self, statement: str, *values: object) -> Any:
        """Return the only value of the only row."""
        ((value,),) = self.sql(statement, *values)
        return value

    def blob(self, query: str, *values: object) -> Path:
        """Return the file whose name the query selects."""
        return self.root / "blobs" / str(self.one(query, *values))

    def contents(self) -> dict[str, bytes]:
        """Every file of the directory, byte for byte."""
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in sorted(self.root.rglob("*"))
            if path.is_file()
        }


async def make(root: Path) -> Data:
    """Work for a while, then stop: a batch half done, one that ended, an upload begun."""
    async with running(root) as store:
        (root / "secret").chmod(0o600)
        ended = await _ended_batch(store)
        half_done = await _open_batch(store)
        content = b"".join(chat_line(f"u{number}") for number in range(4))
        upload = await uploads.create(store, 2 * len(content))
        for _ in range(2):
            await uploads.add(store, upload.id, content)
    return Data(root, half_done, ended, upload.id)


async def _ended_batch(store: Store) -> str:
    batch_id = await store.batch(ENDED_LINES)
    (dispatch,) = await store.cut((batch_id, ENDED_LINES))
    opened = await store.open(dispatch)
    await store.finish(opened.token, range(ENDED_LINES), batch_id, failed=[1])
    await store.turn()
    return batch_id


async def _open_batch(store: Store) -> str:
    """Lines 0-3 are done, of 4-6 line 5 is, 7 and 8 wait in a chunk, 9 was never cut."""
    batch_id = await store.batch(OPEN_LINES)
    first, second, _ = await store.cut((batch_id, 4), (batch_id, 3), (batch_id, 2))
    one = await store.open(first)
    # Above what stays in its row, so that it is a blob.
    await store.finish(one.token, range(4), batch_id, answer=LONG_ANSWER)
    two = await store.open(second, "e1")
    await store.finish(two.token, [5], batch_id)
    return batch_id


def rounds(data: Data, *, most: int = 4) -> Iterator[Found]:
    """Check, run all statements that the check names, and check again until it names none."""
    for _ in range(most):
        found = check(data.root, deep=True)
        yield found
        if not found.statements():
            return
        for statement in found.statements():
            data.sql(statement)
