"""What the two databases do differently: connections, the head of a transaction, faults."""

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError

from services.kit.process.settings import SettingsError
from services.store.db.dialect import Dialect
from services.store.db.sqlite import Sqlite

_POSTGRES = ("postgresql", "postgres", "postgresql+psycopg")


def parse_url(url: str) -> sa.URL:
    """Return the parts of a database's URL.

    Raises:
        SettingsError: it is no URL; without its text, since it may hold a password.
    """
    try:
        return sa.make_url(url)
    except (ArgumentError, ValueError):
        raise SettingsError(
            "NIGHTSHIFT_STORE_DATABASE_URL is no URL such as postgresql://USER@HOST/DATABASE"
        ) from None


def open_dialect(url: str, *, durable: bool) -> Dialect:
    """Return what works on the database of a URL; nothing is connected yet.

    Raises:
        SettingsError: it is no URL of PostgreSQL or SQLite.
    """
    parsed = parse_url(url)
    if parsed.drivername in {"sqlite", "sqlite+pysqlite"}:
        if parsed.database in {None, "", ":memory:"}:
            raise SettingsError(
                "NIGHTSHIFT_STORE_DATABASE_URL names no file, such as sqlite:////DIRECTORY/FILE.db"
            )
        return Sqlite(parsed, durable=durable)
    if parsed.drivername in _POSTGRES:
        # Imported where it is used: the embedded store has no need of its 10 MiB.
        from services.store.db.postgres import Postgres

        return Postgres(parsed.set(drivername="postgresql+psycopg"), durable=durable)
    raise SettingsError(
        f"NIGHTSHIFT_STORE_DATABASE_URL begins with {parsed.drivername}; the store works on "
        "postgresql://… and sqlite:///…"
    )
