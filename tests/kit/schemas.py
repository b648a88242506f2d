"""What a database says of its schema, to be compared."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa


def _words(found: Mapping[str, Any]) -> str:
    """What a reflected part says; conditions are texts that have no words of their own."""
    options = {name: str(each) for name, each in found.get("dialect_options", {}).items()}
    return repr({**found, "dialect_options": options})


def schema_of(engine: sa.Engine) -> dict[str, object]:
    """All that a database says of its tables, in no order; columns may stand in any."""
    with engine.connect() as connection:
        found = sa.inspect(connection)
        return {
            table: {
                "columns": {
                    each["name"]: (str(each["type"]), each["nullable"], each["default"])
                    for each in found.get_columns(table)
                },
                "key": found.get_pk_constraint(table),
                **{
                    name: sorted(map(_words, read(table)))
                    for name, read in (
                        ("foreign", found.get_foreign_keys),
                        ("checks", found.get_check_constraints),
                        ("unique", found.get_unique_constraints),
                        ("indexes", found.get_indexes),
                    )
                },
            }
            for table in found.get_table_names()
        }
