"""Alembic's environment: a connection that the store passes in, or a URL by `-x url=…`."""

import sqlalchemy as sa
from alembic import context

from services.store.tables.core import metadata


def _run(connection: sa.Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        # SQLite cannot alter tables in place; Alembic then copies them.
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    _run(given)
else:
    engine = sa.create_engine(context.get_x_argument(as_dictionary=True)["url"])
    with engine.begin() as own:
        _run(own)
