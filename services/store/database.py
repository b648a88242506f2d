"""SQL access: one writer thread that groups commits, and a few reader threads.

Every write is a plain function of a connection. The writer takes all functions that wait, runs
each in a savepoint of one transaction, commits once, and only then answers: one fsync serves many
callers, and a failed function undoes itself alone. Nothing that a client does can cancel a
transaction half-way, since it runs in a thread that no task owns.

The async driver is not used: through it a commit costs six times as much
(docs/adr/0001-synchronous-sql.md).
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from services.kit import failpoints
from services.kit.errors import UnavailableError
from services.kit.log import get_logger

_log = get_logger(__name__)

T = TypeVar("T")
Statement = Callable[[sa.Connection], T]

_GROUP: Final = 64
"""Most functions of one transaction; more would make the first wait for the last."""
_QUEUED: Final = 4_096
_TRIES: Final = 5
_READERS: Final = 4


class _Job:
    __slots__ = ("future", "statement", "step")

    def __init__(self, step: str, statement: Statement[Any]) -> None:
        self.step = step
        self.statement = statement
        self.future: Future[Any] = Future()


class Database:
    """The store's SQL database."""

    def __init__(self, url: str, *, durable: bool = True) -> None:
        """Open `url`; `durable` False trades the last commits before a power cut for speed."""
        self.is_sqlite = url.startswith("sqlite")
        self._writer_engine = self._engine(url, durable, size=1, begin="BEGIN IMMEDIATE")
        self._reader_engine = self._engine(url, durable, size=_READERS, begin="BEGIN")
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_QUEUED)
        self._readers = ThreadPoolExecutor(_READERS, "store-reader")
        self._writer = threading.Thread(target=self._write_groups, name="store-writer", daemon=True)
        self._writer.start()

    def _engine(self, url: str, durable: bool, *, size: int, begin: str) -> sa.Engine:
        engine = sa.create_engine(url, poolclass=QueuePool, pool_size=size, max_overflow=0)
        if not self.is_sqlite:
            return engine
        synchronous = "FULL" if durable else "NORMAL"

        @sa.event.listens_for(engine, "connect")
        def prepare(connection: Any, _record: Any) -> None:
            # The driver's own transaction handling loses updates; we say BEGIN ourselves.
            connection.isolation_level = None
            for pragma in (
                "journal_mode=WAL",
                f"synchronous={synchronous}",
                "busy_timeout=5000",
                "foreign_keys=ON",
            ):
                connection.execute(f"PRAGMA {pragma}").close()

        @sa.event.listens_for(engine, "begin")
        def start(connection: sa.Connection) -> None:
            connection.exec_driver_sql(begin)

        return engine

    async def write(self, step: str, statement: Statement[T]) -> T:
        """Run `statement` in a transaction and return once it is durable.

        Args:
            step: its name among the failpoints (`docs/durability.md`).
            statement: called with a connection, in the writer's thread; what it raises undoes it
                alone and comes back to the caller. It may run again after a serialization failure.

        Raises:
            UnavailableError: too many writes wait, or the database cannot be written.
        """
        job = _Job(step, statement)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise UnavailableError(
                "The store has more to write than it can; try again.", retry_after_seconds=1
            ) from None
        result: T = await asyncio.wrap_future(job.future)
        return result

    async def read(self, statement: Statement[T]) -> T:
        """Run `statement` on a consistent snapshot, in a reader's thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._readers, self._read, statement
        )

    def _read(self, statement: Statement[T]) -> T:
        with self._reader_engine.connect() as connection, connection.begin():
            return statement(connection)

    def run(self, statement: Statement[T]) -> T:
        """Run `statement` in a transaction of the calling thread; for start-up and checks."""
        with self._writer_engine.begin() as connection:
            return statement(connection)

    @property
    def writer_engine(self) -> sa.Engine:
        """The engine that migrations run on, before anything else does."""
        return self._writer_engine

    def close(self) -> None:
        """Finish what is queued and close all connections."""
        self._jobs.put(None)
        self._writer.join()
        self._readers.shutdown()
        self._reader_engine.dispose()
        self._writer_engine.dispose()

    def _write_groups(self) -> None:
        stopped = False
        while not stopped:
            group, stopped = self._next_group()
            if group:
                self._commit(group)

    def _next_group(self) -> tuple[list[_Job], bool]:
        group: list[_Job] = []
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

    def _commit(self, group: list[_Job]) -> None:
        for attempt in range(1, _TRIES + 1):
            outcomes: list[tuple[_Job, Any, BaseException | None]] = []
            try:
                with self._writer_engine.begin() as connection:
                    outcomes.extend(_run_each(connection, group))
                    for job in group:
                        failpoints.before(job.step)
                for job in group:
                    failpoints.after(job.step)
            except BaseException as error:  # noqa: BLE001 - every caller must get an answer
                if attempt < _TRIES and _may_pass(error):
                    continue
                _log.error("commit_failed", jobs=len(group), exc_info=error)
                failure = UnavailableError(
                    "The database cannot be written right now; try again.", retry_after_seconds=1
                )
                outcomes = [(job, None, failure) for job in group]
            for job, result, error_of_job in outcomes:
                if error_of_job is None:
                    _answer(job, result)
                else:
                    _refuse(job, error_of_job)
            return


def _run_each(
    connection: sa.Connection, group: list[_Job]
) -> Iterator[tuple[_Job, Any, BaseException | None]]:
    for job in group:
        try:
            # A function that is alone needs no savepoint, whose two statements cost as much as it.
            with connection.begin_nested() if len(group) > 1 else _rolled_back(connection):
                result = job.statement(connection)
        except DBAPIError as error:
            if _may_pass(error):
                # The whole transaction is gone with it.
                raise
            yield job, None, error
        except Exception as error:  # noqa: BLE001 - belongs to the caller
            yield job, None, error
        else:
            yield job, result, None


@contextlib.contextmanager
def _rolled_back(connection: sa.Connection) -> Iterator[None]:
    """Undo the whole transaction where the block fails."""
    try:
        yield
    except BaseException:
        connection.rollback()
        raise


def _may_pass(error: BaseException) -> bool:
    """Tell whether repeating the transaction can help: a deadlock or a serialization failure."""
    if not isinstance(error, DBAPIError):
        return False
    return getattr(error.orig, "sqlstate", None) in {"40001", "40P01"}


def _answer(job: _Job, result: Any) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        if job.future.set_running_or_notify_cancel():
            job.future.set_result(result)


def _refuse(job: _Job, error: BaseException) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        if job.future.set_running_or_notify_cancel():
            job.future.set_exception(error)
