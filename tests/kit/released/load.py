"""Puts the data of a released schema where a store of that version would have left it."""

import base64
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from services.store.db import migrate
from services.store.db.database import Database

FOLDER: Final = Path(__file__).parent
SCHEMAS: Final = sorted(file.stem for file in FOLDER.glob("*.json"))
"""Revisions of which there is data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch in that data.

    Attributes:
        id: of the batch.
        lines: how many it has; the custom id of line n is `rn`, unless it has only one.
        ends: the state in which it ends once it is gone on with.
    """

    id: str
    lines: int
    ends: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The data of a schema. `made`: what SQLite keeps of each table and index, by name."""

    schema: str
    made: dict[str, str]
    batches: list[Batch]
    tables: dict[str, Any]
    blobs: dict[str, str]

    def load(self, url: str, data: Path) -> None:
        """Make the schema in an empty database, and put rows there and blobs below `data`."""
        database = Database(url)
        try:
            with database.writer_engine.begin() as connection:
                make_schema(connection, self.schema)
                self._insert(connection)
        finally:
            database.close()
        for name, content in self.blobs.items():
            place = data / "blobs" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(zlib.decompress(base64.b64decode(content)))

    def _insert(self, connection: sa.Connection) -> None:
        found = sa.MetaData()
        found.reflect(connection)
        for table in found.sorted_tables:
            said = self.tables.get(table.name, {"rows": []})
            for row in said["rows"]:
                values = {
                    name: _value(value, table.c[name])
                    for name, value in zip(said["columns"], row, strict=True)
                }
                names = ", ".join(values)
                places = ", ".join(f":{name}" for name in values)
                connection.execute(
                    sa.text(f"INSERT INTO {table.name} ({names}) VALUES ({places})"), values
                )
        if connection.dialect.name == "postgresql":
            # As they stand where a store gave the numbers.
            for name in ("segments", "outbox"):
                connection.execute(
                    sa.text(
                        f"SELECT setval(pg_get_serial_sequence('{name}', 'id'),"
                        f" (SELECT max(id) FROM {name}))"
                    )
                )


def released(schema: str) -> Released:
    """Return the data of a schema."""
    said = json.loads((FOLDER / f"{schema}.json").read_text())
    return Released(
        schema=schema,
        made=said["schema"],
        batches=[Batch(**each) for each in said["batches"]],
        tables=said["tables"],
        blobs=said["blobs"],
    )


def make_schema(connection: sa.Connection, revision: str) -> None:
    """Run the migrations up to a revision."""
    config = Config()
    config.set_main_option("script_location", str(migrate.MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _value(value: Any, column: sa.Column[Any]) -> Any:
    if isinstance(value, dict):
        return zlib.decompress(base64.b64decode(value["zlib"]))
    # SQLite keeps them as numbers.
    return bool(value) if isinstance(column.type, sa.Boolean) and value is not None else value
