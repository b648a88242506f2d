"""The database as such: its schema, its pages, the references between rows, the counters."""

from typing import Any, Final

import sqlalchemy as sa

from services.store.checkup.report import Kind
from services.store.checkup.rows_read import View
from services.store.db import migrate
from services.store.domain.checks import statement
from services.store.domain.checks.fault import Fault
from services.store.tables.core import counters, metadata

_MOST: Final = 20
_BACKUP: Final = (
    "Stop nightshift and copy the whole directory. Then restore nightshift.db from a backup, or "
    "save what can be read of it: sqlite3 nightshift.db .recover | sqlite3 recovered.db"
)
_BY_HAND: Final = "Stop nightshift, run the statement, and check again."


class SchemaError(Exception):
    """The database is of another version; the message says what to do."""


def check_revision(view: View) -> str:
    """Return the revision of the schema, which is the newest that this code knows.

    Raises:
        SchemaError: it is another, so that its rows cannot be judged.
    """
    with view.snapshot() as connection:
        current = migrate.revision(connection)
    return check_known(current)


def check_known(current: str | None) -> str:
    """Return this revision, which is the newest that this code knows.

    Raises:
        SchemaError: it is another, so that rows cannot be judged.
    """
    if current is None:
        raise SchemaError("the database holds no schema: no store ever finished its first start")
    if current != migrate.HEAD:
        is_older = current in migrate.known_revisions()
        mend = (
            "start this version on it once, which brings it up to date"
            if is_older
            else "use the version that wrote it"
        )
        raise SchemaError(
            f"the database is of {'an older' if is_older else 'a newer'} version (schema "
            f"{current}, this is {migrate.HEAD}): {mend}"
        )
    return current


def check(view: View, kind: Kind, *, deep: bool) -> None:
    """Check what SQLite itself can tell, and that rows refer to rows."""
    with view.snapshot() as connection:
        _check_tables(connection, kind)
        kind.count("pages", connection.exec_driver_sql("PRAGMA page_count").scalar_one())
    with view.snapshot() as connection:
        _check_pages(connection, kind, deep=deep)
    with view.snapshot() as connection:
        _check_references(connection, kind)
    with view.snapshot() as connection:
        _check_counters(connection, kind)


def _check_tables(connection: sa.Connection, kind: Kind) -> None:
    inspector = sa.inspect(connection)
    there = set(inspector.get_table_names())
    for table in metadata.sorted_tables:
        if table.name not in there:
            kind.add(_schema_fault(f"has no table {table.name}"))
            continue
        kind.count("tables")
        columns = {column["name"] for column in inspector.get_columns(table.name)}
        for column in table.columns:
            if column.name not in columns:
                kind.add(_schema_fault(f"has no column {table.name}.{column.name}"))
        indexes = {index["name"] for index in inspector.get_indexes(table.name)}
        for index in table.indexes:
            if index.name not in indexes:
                kind.add(_schema_fault(f"has no index {index.name}, so that much takes long"))


def _schema_fault(what: str) -> Fault:
    return Fault(
        subject="nightshift.db",
        what=what,
        mend="It was changed by hand or written by an unreleased version: restore it from a "
        "backup, or begin with a new directory.",
    )


def _check_pages(connection: sa.Connection, kind: Kind, *, deep: bool) -> None:
    """Ask SQLite: pages, order of rows, NOT NULL and CHECK; deep also indexes against rows."""
    pragma = "integrity_check" if deep else "quick_check"
    for (said,) in connection.exec_driver_sql(f"PRAGMA {pragma}({_MOST})"):
        if said == "ok":
            continue
        if said.startswith("CHECK constraint failed"):
            table = said.rpartition(" ")[2]
            kind.add(
                Fault(
                    subject="nightshift.db",
                    what=f"a row of {table} breaks one of the rules that its table states",
                    mend="It was changed by hand: undo that. The other faults may say which it is.",
                )
            )
            continue
        kind.add(Fault(subject="nightshift.db", what=said, mend=_BACKUP))


def _check_references(connection: sa.Connection, kind: Kind) -> None:
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchmany(_MOST)
    for table, rowid, parent, _ in broken:
        kind.add(
            Fault(
                subject="nightshift.db",
                what=f"row {rowid} of {table} names a row of {parent} that is not there",
                mend="A row was deleted by hand: put it back from a backup of the database.",
            )
        )


def _check_counters(connection: sa.Connection, kind: Kind) -> None:
    """Check that the next number is higher than all that were given."""
    given = 0
    for table in metadata.sorted_tables:
        if "seq" in table.columns:
            highest: Any = connection.scalar(sa.select(sa.func.max(table.c.seq)))
            given = max(given, highest or 0)
    n = connection.scalar(sa.select(counters.c.n).where(counters.c.name == "seq"))
    if n is None or n < given:
        kind.add(
            Fault(
                subject="counters",
                what=f"seq stands at {n}, but {given} was given already: nothing can be created",
                mend=_BY_HAND,
                sql=statement.insert("counters", {"name": "seq"}, n=given),
            )
        )
