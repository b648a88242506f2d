"""What several stores share: a database of a real PostgreSQL, and a directory of blobs."""

from itertools import count
from pathlib import Path
from typing import Final

import pytest

from tests.integration.crash_windows.at_rest import migrate_now
from tests.integration.crash_windows.world import Backing
from tests.kit.postgres import Postgres, postgres

__all__ = ["empty", "migrated_database", "postgres", "shared"]

# Our own is 5 s. A store that stands still inside a transaction is waited for as long.
_IDLE: Final = "?options=-c%20idle_in_transaction_session_timeout%3D1000"


_names: Final = count(1)


@pytest.fixture(scope="session")
def migrated_database(postgres: Postgres) -> str:
    """Make a database without rows once, whose copies are made in a moment."""
    url = postgres.new_database()
    migrate_now(url)
    return url.rpartition("/")[2]


@pytest.fixture
def shared(postgres: Postgres, migrated_database: str, tmp_path: Path) -> Backing:
    """Return a backing on which nothing was ever stored."""
    name = f"windows_{next(_names)}"
    postgres.sql(f"CREATE DATABASE {name} TEMPLATE {migrated_database}")
    return backing(postgres.url(name), tmp_path)


@pytest.fixture
def empty(postgres: Postgres, tmp_path: Path) -> Backing:
    """Return a backing without even a schema."""
    return backing(postgres.new_database(), tmp_path)


def backing(url: str, folder: Path) -> Backing:
    """Return a backing of this database, with blobs and secret in `folder`."""
    blobs = folder / "blobs"
    return Backing(
        {
            "NIGHTSHIFT_STORE_DATABASE_URL": url + _IDLE,
            "NIGHTSHIFT_STORE_BLOBS_URL": blobs.as_uri(),
            "NIGHTSHIFT_SECRET_FILE": str(folder / "secret"),
        },
        database_url=url,
        blob_folder=blobs,
        secret_file=folder / "secret",
    )
