"""Statements that mend a row by hand: for people to read and run, never run from here."""

import re
from collections.abc import Mapping
from typing import Final

_BYTES: Final = re.compile(r"\bX'([0-9a-f]*)'")


class Sql(str):
    """A piece of SQL that stands in a statement as it is."""

    __slots__ = ()


def update(table: str, key: Mapping[str, object], **values: object) -> str:
    """Return the statement that sets these columns of the row with this key."""
    pairs = ", ".join(f"{name} = {_literal(value)}" for name, value in values.items())
    return f"UPDATE {table} SET {pairs}{_where(key)}"  # noqa: S608 - see above


def delete(table: str, **key: object) -> str:
    """Return the statement that deletes the rows with this key."""
    return f"DELETE FROM {table}{_where(key)}"  # noqa: S608 - see above


def insert(table: str, key: Mapping[str, object], **values: object) -> str:
    """Return the statement that inserts this row, or changes the one with this key to it."""
    row = {**key, **values}
    literals = ", ".join(map(_literal, row.values()))
    changes = ", ".join(f"{name} = excluded.{name}" for name in values)
    return (
        f"INSERT INTO {table} ({', '.join(row)}) VALUES ({literals})"  # noqa: S608 - see above
        f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"
    )


def for_postgresql(sql: str) -> str:
    """Return a statement as PostgreSQL takes it, which writes bytes in another way."""
    return _BYTES.sub(r"'\\x\1'::bytea", sql)


def _where(key: Mapping[str, object]) -> str:
    return " WHERE " + " AND ".join(f"{name} = {_literal(value)}" for name, value in key.items())


def _literal(value: object) -> str:
    match value:
        case None:
            return "NULL"
        case Sql():
            return value
        case bytes():
            return f"X'{value.hex()}'"
        case int():
            return f"{value:d}"
        case _:
            return "'" + str(value).replace("'", "''") + "'"
