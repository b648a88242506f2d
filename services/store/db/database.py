"""SQL access: one writer thread that groups commits, and a few reader threads.

Every write is a plain function of a connection. The writer takes all functions that wait, runs
each in a savepoint of one transaction, commits once, and only then answers: one fsync serves many
callers, and a failed function undoes itself alone. Nothing that a client does can cancel a
transaction half-way, since it runs in a thread that no task owns.

The async driver is not used: through it a commit costs six times as much
(docs/adr/0001-synchronous-sql.md).
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import sqlalchemy as sa

from services.kit.process.clock import Clock, SystemClock
from services.kit.process.log import get_logger
from services.kit.wire.errors import UnavailableError
from services.store.db import faults, urls
from services.store.db.clock import DatabaseTime
from services.store.db.writer import Job, Writer

_log = get_logger(__name__)

T = TypeVar("T")
Statement = Callable[[sa.Connection], T]

_GROUP: Final = 64
"""Most functions of one transaction; more would make the first wait for the last."""
_QUEUED: Final = 4_096
_READERS: Final = 4
_READ_PAUSES: Final = (0.05, 0.2, 0.5)
"""Before a read is tried again, in seconds: connections that were cut off are made anew at once."""


class Database:
    """The store's SQL database."""

    def __init__(self, url: str, *, durable: bool = True, clock: Clock | None = None) -> None:
        """Open `url`; nothing is connected before it is used.

        Args:
            url: of SQLite or PostgreSQL.
            durable: False trades the last commits before a power cut for speed.
            clock: the machine's, if not given.

        Raises:
            SettingsError: a URL of something else.
        """
        self.time = DatabaseTime(clock or SystemClock())
        self._dialect = urls.open_dialect(url, durable=durable)
        self._writer_engine = self._dialect.writer()
        self._reader_engine = self._dialect.readers(_READERS)
        self._jobs: queue.Queue[Job | None] = queue.Queue(_QUEUED)
        self._readers = ThreadPoolExecutor(_READERS, "store-reader")
        self._stopping = threading.Event()
        self._unread = False
        self._writer = threading.Thread(target=self._write_groups, name="store-writer", daemon=True)
        self._writer.start()

    @property
    def file(self) -> Path | None:
        """The file of this machine on which one store works at a time; None on a server."""
        return self._dialect.file

    @property
    def holder(self) -> str:
        """What this store's leases on rows are held by."""
        return self._dialect.holder

    def others_dead(self, connection: sa.Connection, holder: Any) -> sa.ColumnElement[bool]:
        """Return the condition that the column `holder` names a store that is dead for certain.

        One that is not may be dead all the same: its lease ends in time.
        """
        return self._dialect.others_dead(connection, holder)

    async def write(self, step: str, statement: Statement[T]) -> T:
        """Run `statement` in a transaction and return once it is durable.

        Args:
            step: its name among the failpoints (`docs/durability.md`).
            statement: called with a connection, in the writer's thread; what it raises undoes it
                alone and comes back to the caller. It runs again where its transaction was undone
                by a fault that passes.

        Raises:
            UnavailableError: too many writes wait, or the database cannot be written. In the latter
                case it may have been, if the connection broke at that moment.
        """
        job = Job(step, statement)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise UnavailableError(
                "The store has more to write than it can; try again.", retry_after_seconds=1
            ) from None
        result: T = await asyncio.wrap_future(job.future)
        return result

    async def probe(self) -> None:
        """Return once a transaction that changes nothing has passed the writer.

        Raises:
            UnavailableError: the database cannot be written.
        """
        await self.write("database.probe", lambda _: None)

    async def read(self, statement: Statement[T]) -> T:
        """Run `statement` on a consistent snapshot, in a reader's thread.

        Raises:
            UnavailableError: the database cannot be reached; trying again can help.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._readers, self._read, statement
        )

    def _read(self, statement: Statement[T]) -> T:
        # While it is away callers are told so at once, rather than have each wait for it.
        for pause in (None,) if self._unread else (*_READ_PAUSES, None):
            try:
                with self._reader_engine.connect() as connection, connection.begin():
                    found = statement(connection)
            except sa.exc.DBAPIError as error:
                if not faults.may_pass(error):
                    raise faults.told(error) from error
                if pause is None or self._stopping.wait(pause):
                    if not self._unread:
                        _log.warning("read_failed", why=faults.summary(error))
                    self._unread = True
                    raise faults.unavailable(error) from error
            else:
                self._unread = False
                return found
        raise AssertionError("the last turn raises")

    def run(self, statement: Statement[T]) -> T:
        """Run `statement` in a transaction of the calling thread; for start-up and checks."""
        with self._writer_engine.begin() as connection:
            return statement(connection)

    def look(self) -> None:
        """Ask the database for its time and show it that this store lives; blocks.

        Raises:
            UnavailableError: it cannot be reached.
        """
        self.time.look_regularly()
        asked = self.time.carried()
        seconds = self._dialect.pulse()
        self.time.observe(self.time.system() if seconds is None else seconds, asked=asked)

    async def keep_time(self) -> None:
        """Do `look` beside the event loop; to be called each second from then on."""
        await asyncio.to_thread(self.look)

    def check(self) -> None:
        """Refuse a database that the store cannot work on.

        Raises:
            SettingsError: the message says what to change.
        """
        with self._reader_engine.connect() as connection, connection.begin():
            self._dialect.check(connection)

    @property
    def writer_engine(self) -> sa.Engine:
        """The engine that migrations run on, before anything else does."""
        return self._writer_engine

    async def erase(self) -> None:
        """Leave nothing of deleted rows on the disk, as far as that keeps nobody waiting."""
        await asyncio.to_thread(self._dialect.erase)

    def forget_marks(self) -> None:
        """Delete what the commits of stores left that are gone; see `Dialect.mark`."""
        self.run(self._dialect.forget_marks)

    def close(self) -> None:
        """Finish what is queued and close all connections."""
        self._stopping.set()
        self._jobs.put(None)
        self._writer.join()
        self._readers.shutdown()
        self._reader_engine.dispose()
        self._writer_engine.dispose()
        self._dialect.close()

    def _write_groups(self) -> None:
        writer = Writer(self._writer_engine, self._dialect, self.time, self._stopping)
        stopped = False
        while not stopped:
            group, stopped = self._next_group()
            if group:
                writer.commit(group)

    def _next_group(self) -> tuple[list[Job], bool]:
        group: list[Job] = []
        item = self._jobs.get()
        while item is not None:
            group.append(item)
            if len(group) == _GROUP:
                return group, False
            try:
                item = self._jobs.get_nowait()
            except queue.Empty:
                return group, False
        return group, True
