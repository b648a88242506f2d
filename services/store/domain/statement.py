"""Statements that mend a row by hand: for people to read and run, never run from here."""

from collections.abc import Mapping


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


def insert(table: str, **values: object) -> str:
    """Return the statement that inserts this row, or takes the place of one with its key."""
    literals = ", ".join(map(_literal, values.values()))
    return f"INSERT OR REPLACE INTO {table} ({', '.join(values)}) VALUES ({literals})"  # noqa: S608 - see above


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
