"""PostgreSQL, for any number of stores at once.

Write transactions of all stores run one after the other, as on SQLite: each begins by taking one
advisory lock (docs/adr/0005-one-writer-across-stores.md). Whoever is stopped or cut off while he
holds it is ended by the server after `IDLE_MS`.
"""

import secrets
from pathlib import Path
from typing import Any, Final

import psycopg
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError

from services.kit.process.log import get_logger
from services.kit.process.settings import SettingsError
from services.store.db.dialect import Head, Mark
from services.store.db.faults import may_pass, unavailable
from services.store.db.nul_text import register_text
from services.store.tables.ledgers import commit_marks

_log = get_logger(__name__)

OLDEST_VERSION: Final = 14
IDLE_MS: Final = 5_000
"""A transaction between whose statements so much time passes is ended: its store is stopped."""
_LOCK_MS: Final = 8_000
"""More than `IDLE_MS`, so that a stopped holder has been ended before a waiting store gives up."""
_STATEMENT_MS: Final = 30_000
_READ_IDLE_MS: Final = 30_000

# "nightshift" is 10 letters; any number does, as long as it stays the same.
_WRITE_LOCK: Final = 0x6E69676874
_PRESENCE: Final = 0x6E696768
"""Class of the advisory locks by which stores are known to live; the object is the store."""

_CONNECT: Final[dict[str, Any]] = {
    "connect_timeout": 3,
    "application_name": "nightshift-store",
    # A server that is gone without a word is noticed in some 11 s.
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
# In this order: the time is that after the lock was got.
_HEAD: Final = sa.text(
    "SELECT pg_advisory_xact_lock(:lock), pg_current_xact_id()::text AS transaction,"
    " extract(epoch FROM clock_timestamp())::float8 AS seconds"
).bindparams(lock=_WRITE_LOCK)
_MARK: Final = (
    insert(commit_marks)
    .values(store=sa.bindparam("store"), nonce=sa.bindparam("nonce"))
    .on_conflict_do_update(index_elements=["store"], set_={"nonce": sa.bindparam("nonce")})
)
_MARK_AGAIN: Final = (
    commit_marks.update()
    .where(
        commit_marks.c.store == sa.bindparam("of_store"),
        commit_marks.c.nonce == sa.bindparam("of_nonce"),
    )
    .values(nonce=commit_marks.c.nonce)
)
_TIME: Final = "SELECT extract(epoch FROM clock_timestamp())::float8"
_SHOW: Final = "SELECT pg_try_advisory_lock(%s, %s)"
_LIVING: Final = sa.text(
    "SELECT objid::text FROM pg_locks WHERE locktype = 'advisory' AND granted"
    " AND classid = CAST(:stores AS oid) AND objsubid = 2"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
).bindparams(stores=_PRESENCE)


class Postgres:
    """A database of a PostgreSQL server; see `Dialect`."""

    def __init__(self, url: sa.URL, *, durable: bool) -> None:
        """Use the database that `url` names; without `durable` a crash may lose the last commits.

        Options of the connection in `url` go before ours.
        """
        self.holder = str(secrets.randbelow(2**31))
        self.file: Path | None = None
        self._url = url
        self._durable = durable
        self._presence: psycopg.Connection[Any] | None = None
        self._is_shown = False

    def writer(self) -> sa.Engine:
        """See `Dialect`."""
        # Each statement sees what was committed before it: the lock is got by the first of them.
        engine = self._engine(1, idle_ms=IDLE_MS, isolation_level="READ COMMITTED")

        @sa.event.listens_for(engine, "begin")
        def start(connection: sa.Connection) -> None:
            row = connection.execute(_HEAD).one()
            connection.info["head"] = Head(seconds=row.seconds, transaction=row.transaction)

        return engine

    def readers(self, size: int) -> sa.Engine:
        """See `Dialect`."""
        return self._engine(
            size,
            idle_ms=_READ_IDLE_MS,
            isolation_level="REPEATABLE READ",
            execution_options={"postgresql_readonly": True},
        )

    def _engine(self, size: int, *, idle_ms: int, **more: Any) -> sa.Engine:
        engine = sa.create_engine(
            self._url,
            pool_size=size,
            max_overflow=0,
            connect_args=self._arguments(idle_ms),
            # One trip less for each connection; there are no hstores.
            use_native_hstore=False,
            **more,
        )

        @sa.event.listens_for(engine, "connect")
        def prepare(connection: Any, _record: Any) -> None:
            register_text(connection.adapters)
            if self._durable:
                # Never less than a synced commit, whatever server or role say; more is theirs.
                connection.execute(
                    "SELECT set_config('synchronous_commit', 'on', false)"
                    " WHERE current_setting('synchronous_commit') = 'off'"
                )
                connection.commit()

        return engine

    def _arguments(self, idle_ms: int) -> dict[str, Any]:
        options = [
            f"-c lock_timeout={_LOCK_MS}",
            f"-c statement_timeout={_STATEMENT_MS}",
            f"-c idle_in_transaction_session_timeout={idle_ms}",
            "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=2 -c tcp_keepalives_count=3",
            "-c tcp_user_timeout=10000",
        ]
        if not self._durable:
            options.append("-c synchronous_commit=off")
        given = dict(self._url.query)
        asked = given.pop("options", "")
        arguments = {name: value for name, value in _CONNECT.items() if name not in given}
        return {**arguments, "options": " ".join([*options, str(asked)]).strip()}

    def head(self, connection: sa.Connection) -> Head:
        """See `Dialect`."""
        head: Head = connection.info["head"]
        return head

    def mark(self, connection: sa.Connection) -> Mark | None:
        """See `Dialect`."""
        transaction = self.head(connection).transaction
        assert transaction is not None
        mark = Mark(transaction, secrets.token_hex(16))
        connection.execute(_MARK, {"store": self.holder, "nonce": mark.nonce})
        return mark

    def committed(self, connection: sa.Connection, mark: Mark) -> bool | None:
        """See `Dialect`."""
        # Written again, so that committing this waits for a standby that may not have it yet.
        mine = {"of_store": self.holder, "of_nonce": mark.nonce}
        if connection.execute(_MARK_AGAIN, mine).rowcount:
            return True
        # It is not in this database. Did this server undo it, or take over without it?
        try:
            with connection.begin_nested():
                status = connection.scalar(
                    sa.text("SELECT pg_xact_status(CAST(:id AS xid8))"), {"id": mark.transaction}
                )
        except DBAPIError as error:
            if may_pass(error):
                raise
            # Another server, which never saw it.
            return None
        # "committed" is another transaction of the same number.
        return False if status == "aborted" else None

    def forget_marks(self, connection: sa.Connection) -> None:
        """See `Dialect`."""
        connection.execute(
            commit_marks.delete().where(self.others_dead(connection, commit_marks.c.store))
        )

    def others_dead(self, connection: sa.Connection, holder: Any) -> sa.ColumnElement[bool]:
        """See `Dialect`: each store holds a lock for as long as its process is connected."""
        living = [*connection.scalars(_LIVING), self.holder]
        dead: sa.ColumnElement[bool] = holder.not_in(living)
        return dead

    def pulse(self) -> float | None:
        """See `Dialect`; keeps the connection whose lock shows that this store lives."""
        try:
            if self._presence is None:
                words, address = sa.create_engine(self._url).dialect.create_connect_args(self._url)
                self._presence = psycopg.connect(
                    *words, **{**address, **self._arguments(IDLE_MS), "autocommit": True}
                )
                self._is_shown = False
            if not self._is_shown:
                # Not at once where the server has not seen the end of an earlier connection.
                row = self._presence.execute(_SHOW, (_PRESENCE, int(self.holder))).fetchone()
                self._is_shown = bool(row and row[0])
            row = self._presence.execute(_TIME).fetchone()
        except psycopg.Error as error:
            self.close()
            raise unavailable(error) from error
        assert row is not None
        seconds: float = row[0]
        return seconds

    def erase(self) -> None:
        """See `Dialect`; what a server keeps of its log is its operator's."""

    def check(self, connection: sa.Connection) -> None:
        """See `Dialect`."""
        version = int(connection.exec_driver_sql("SHOW server_version_num").scalar_one())
        if version < OLDEST_VERSION * 10_000:
            raise SettingsError(
                f"NIGHTSHIFT_STORE_DATABASE_URL names a PostgreSQL {version // 10_000}; the store "
                f"needs {OLDEST_VERSION} or later"
            )
        encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
        if encoding != "UTF8":
            raise SettingsError(
                f"NIGHTSHIFT_STORE_DATABASE_URL names a database in {encoding}; make one with "
                "CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
            )
        if self._durable and connection.exec_driver_sql("SHOW fsync").scalar_one() != "on":
            _log.warning("database_does_not_sync", setting="fsync")

    def close(self) -> None:
        """See `Dialect`."""
        if self._presence is not None:
            self._presence.close()
            self._presence = None
