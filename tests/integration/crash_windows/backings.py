"""What several stores share: a database of a real PostgreSQL, and a directory of blobs."""

from pathlib import Path
from typing import Final

import pytest

from tests.integration.crash_windows.world import Backing
from tests.kit.postgres import Postgres, postgres

__all__ = ["postgres", "shared"]

# Our own is 5 s. A store that stands still inside a transaction is waited for as long.
_IDLE: Final = "?options=-c%20idle_in_transaction_session_timeout%3D1000"


@pytest.fixture
def shared(postgres: Postgres, tmp_path: Path) -> Backing:
    """Return a backing on which nothing was ever stored."""
    url = postgres.new_database()
    blobs = tmp_path / "blobs"
    return Backing(
        {
            "NIGHTSHIFT_STORE_DATABASE_URL": url + _IDLE,
            "NIGHTSHIFT_STORE_BLOBS_URL": blobs.as_uri(),
            "NIGHTSHIFT_SECRET_FILE": str(tmp_path / "secret"),
        },
        database_url=url,
        blob_folder=blobs,
        secret_file=tmp_path / "secret",
    )
