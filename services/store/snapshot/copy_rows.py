"""All rows of one database into another, of the same schema and of either kind."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import sqlalchemy as sa

from services.store.tables.core import counters, metadata, outbox, projects, segments
from services.store.tables.ledgers import commit_marks

Told = Callable[[int], None]

_ROWS: Final = 500
_LARGE_ROWS: Final = 32
"""Rows of results at once: each may hold a quarter of a MiB."""
_COPIED: Final = tuple(table for table in metadata.sorted_tables if table is not commit_marks)
"""All but what stores know their own commits by."""
_MADE_BY_MIGRATING: Final = (counters, projects)


def copy_all(source: sa.Connection, target: sa.Connection, told: Told) -> int:
    """Copy every row, a few at a time, and return how many.

    Args:
        source: in a transaction that reads everything as of one moment.
        target: in a transaction; whatever is in its tables goes.
        told: called with the number of rows so far.
    """
    # What a first start makes, and what an earlier try copied before the connection broke.
    for table in reversed(_COPIED):
        target.execute(table.delete())
    copied = 0
    for table in _COPIED:
        insert = _insert(table, target.dialect)
        for rows in _pages(source, table):
            target.execute(insert, rows)
            copied += len(rows)
            told(copied)
    give_from(target, numbers_given(source))
    _number_segments(target)
    return copied


def is_fresh(connection: sa.Connection) -> bool:
    """Tell whether nothing stands in a database but what a first start puts there."""
    if connection.scalar(sa.select(sa.func.max(counters.c.n))):
        return False
    return all(
        len(connection.execute(sa.select(sa.literal(1)).select_from(table).limit(2)).all())
        <= (1 if table in _MADE_BY_MIGRATING else 0)
        for table in _COPIED
    )


def count(connection: sa.Connection) -> int:
    """Return how many rows there are in all."""
    return sum(
        connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0 for table in _COPIED
    )


def _pages(source: sa.Connection, table: sa.Table) -> Iterator[Sequence[dict[str, Any]]]:
    size = _LARGE_ROWS if table is segments else _ROWS
    query = sa.select(
        *(_as_stored(column, source.dialect).label(column.name) for column in table.c)
    )
    # Read as they are taken, on PostgreSQL through a cursor there.
    for rows in source.execute(query.execution_options(yield_per=size)).mappings().partitions():
        yield [dict(row) for row in rows]


def _as_stored(column: sa.Column[Any], dialect: sa.Dialect) -> sa.ColumnElement[Any]:
    """JSON is carried over as the text it is, so that not a letter of it changes."""
    if not isinstance(column.type, sa.JSON):
        return column
    if dialect.name == "sqlite":
        return sa.type_coerce(column, sa.Text)
    return sa.cast(column, sa.Text)


def _insert(table: sa.Table, dialect: sa.Dialect) -> sa.Insert:
    plain = sa.table(
        table.name,
        *(sa.column(c.name, sa.Text() if isinstance(c.type, sa.JSON) else c.type) for c in table.c),
    )
    if dialect.name == "sqlite":
        return plain.insert()
    return plain.insert().values(
        {
            column.name: sa.cast(sa.bindparam(column.name, type_=sa.Text()), sa.JSON)
            for column in table.c
            if isinstance(column.type, sa.JSON)
        }
    )


# --- numbers that are never given twice -----------------------------------------------------------


def numbers_given(connection: sa.Connection) -> int:
    """Return the highest number that an event ever got: NATS drops what comes under one twice."""
    if connection.dialect.name == "sqlite":
        given = connection.scalar(sa.text("SELECT seq FROM sqlite_sequence WHERE name = 'outbox'"))
        return int(given or 0)
    last, is_called = connection.execute(
        sa.text(f"SELECT last_value, is_called FROM {_sequence(connection, outbox)}")  # noqa: S608 - a name of ours
    ).one()
    return int(last) if is_called else 0


def give_from(connection: sa.Connection, given: int) -> None:
    """Have the next event get a higher number than `given`, which is not negative."""
    if connection.dialect.name == "sqlite":
        # No key is declared on that table.
        connection.execute(sa.text("DELETE FROM sqlite_sequence WHERE name = 'outbox'"))
        connection.execute(
            sa.text("INSERT INTO sqlite_sequence (name, seq) VALUES ('outbox', :n)"), {"n": given}
        )
    else:
        _set_sequence(connection, outbox, given)


def _number_segments(connection: sa.Connection) -> None:
    if connection.dialect.name != "sqlite":
        highest: int | None = connection.scalar(sa.select(sa.func.max(segments.c.id)))
        _set_sequence(connection, segments, highest or 0)


def _set_sequence(connection: sa.Connection, table: sa.Table, given: int) -> None:
    connection.execute(
        sa.text("SELECT setval(CAST(:name AS regclass), :n, :called)"),
        {"name": _sequence(connection, table), "n": max(given, 1), "called": given > 0},
    )


def _sequence(connection: sa.Connection, table: sa.Table) -> str:
    return str(
        connection.scalar(
            sa.text("SELECT pg_get_serial_sequence(:name, 'id')"), {"name": table.name}
        )
    )
