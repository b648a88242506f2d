"""A store that its database does not let in says what to mend, and goes on once that is done."""

from pathlib import Path

import orjson
import pytest

from tests.kit.eventually import eventually
from tests.kit.ports import free_port
from tests.kit.postgres import Postgres
from tests.kit.store import START_SECONDS, StoreProcess, client_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]

PASSWORD = "nobody-is-to-read-this"


def reasons(store: StoreProcess) -> list[tuple[str, str]]:
    """Return why it waited for its database, and what it said to do, in order."""
    lines = [orjson.loads(line) for line in store.log().splitlines() if line.startswith("{")]
    return [(line["why"], line["mend"]) for line in lines if line["event"] == "database_awaited"]


async def last_reason(store: StoreProcess, words: str) -> str:
    """Wait until it waits for that; return what it said to do."""

    def said() -> str:
        why, mend = (reasons(store) or [("", "")])[-1]
        return mend if words in why else ""

    return await eventually(said, within_seconds=START_SECONDS)


async def test_a_refused_password_and_a_missing_database_are_told_and_waited_out(
    tmp_path: Path, postgres: Postgres
) -> None:
    role = postgres.new_role("another one")
    database = f"of_{role}"
    password_file = tmp_path / "password"
    password_file.write_text(f"{PASSWORD}\n")
    environment = {
        "NIGHTSHIFT_STORE_DATABASE_PASSWORD_FILE": str(password_file),
        "NIGHTSHIFT_NATS_URL": f"nats://127.0.0.1:{free_port()}",
        "NIGHTSHIFT_STORE_DATABASE_URL": (
            f"postgresql://{role}@127.0.0.1:{postgres.port}/{database}"
        ),
    }
    store = StoreProcess(tmp_path / "data", environment)
    store.start()
    try:
        mend = await last_reason(store, "password authentication failed")
        assert "does not let this user in" in mend
        assert "NIGHTSHIFT_STORE_DATABASE_URL" in mend
        # At a first start whoever makes role and database may be a moment late.
        postgres.sql(f"ALTER ROLE {role} PASSWORD '{PASSWORD}'")
        assert "make that database" in await last_reason(store, "does not exist")
        postgres.sql(f"CREATE DATABASE {database} OWNER {role} TEMPLATE template0 ENCODING 'UTF8'")
        async with client_of(store) as client:
            assert (await client.upload(b"x", purpose="user_data")).bytes == 1
        assert PASSWORD not in store.log()
        assert "Traceback" not in store.log()
    finally:
        store.kill()
