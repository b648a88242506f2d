"""The writer's transactions: a group of functions, one commit, an answer to each.

A commit whose answer was lost is looked up before anything else is done: what was committed is
answered as such, what was not is done again.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from services.kit.process import failpoints
from services.kit.process.log import get_logger
from services.kit.wire.errors import UnavailableError
from services.store.db import faults
from services.store.db.clock import DatabaseTime
from services.store.db.dialect import Dialect, Mark

_log = get_logger(__name__)

_FIRST_PAUSE_SECONDS: Final = 0.05
_MOST_PAUSE_SECONDS: Final = 1.0
PATIENCE_SECONDS: Final = 4.0
"""How long a group is tried again; its callers wait for 10 s at most, some for 2 s."""
_DOUBT_SECONDS: Final = 20.0
"""How long a commit in doubt is asked for: a retry of a committed write would apply it twice."""


class Job:
    """A function that waits for its transaction, and where its caller finds the outcome."""

    __slots__ = ("future", "statement", "step")

    def __init__(self, step: str, statement: Callable[[sa.Connection], Any]) -> None:
        """Wait to run `statement` as the step of that name."""
        self.step = step
        self.statement = statement
        self.future: Future[Any] = Future()


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a function returned, or the error that undid it."""

    job: Job
    result: Any = None
    error: BaseException | None = None

    def tell(self) -> None:
        future = self.job.future
        if not future.set_running_or_notify_cancel():
            # The caller has gone away.
            return
        if self.error is None:
            future.set_result(self.result)
        else:
            future.set_exception(self.error)


class _UnknownError(Exception):
    """The connection broke during the commit, and the server cannot tell what became of it."""


class Writer:
    """Commits groups, one at a time; lives in one thread."""

    def __init__(
        self, engine: sa.Engine, dialect: Dialect, time: DatabaseTime, stopping: threading.Event
    ) -> None:
        """Write through `engine`; give up waiting for better times once `stopping` is set."""
        self._engine = engine
        self._dialect = dialect
        self._time = time
        self._stopping = stopping
        self._away = False
        self._doubt: tuple[Mark, list[_Outcome]] | None = None

    def commit(self, group: Sequence[Job]) -> None:
        """Run a group in one transaction and answer each of its callers, whatever happens."""
        try:
            outcomes = self._until_done(group)
        except BaseException as error:  # noqa: BLE001 - every caller must get an answer
            _log.error("commit_failed", jobs=len(group), exc_info=error)
            failure = faults.unavailable(error)
            outcomes = [_Outcome(job, error=failure) for job in group]
        for outcome in outcomes:
            outcome.tell()

    def _until_done(self, group: Sequence[Job]) -> list[_Outcome]:
        began = self._time.carried()
        pause = _FIRST_PAUSE_SECONDS
        self._doubt = None
        while True:
            try:
                outcomes = self._once(group)
            except Exception as error:
                if not (self._in_doubt() or faults.may_pass(error)):
                    raise
                self._time.faulty(began)
                if isinstance(error, _UnknownError) or not self._worth_waiting(began, pause):
                    self._give_up(error, len(group))
                    return [_Outcome(job, error=self._failure(error)) for job in group]
                pause = min(2 * pause, _MOST_PAUSE_SECONDS)
            else:
                if self._away:
                    _log.info("database_back")
                self._away = False
                self._time.written()
                return outcomes

    def _in_doubt(self) -> bool:
        return self._doubt is not None

    def _worth_waiting(self, began: float, pause: float) -> bool:
        """Wait a moment; tell whether to try again then."""
        patience = PATIENCE_SECONDS
        if self._in_doubt():
            patience = _DOUBT_SECONDS
        elif self._away:
            # It was away a moment ago: tell callers so, rather than have each wait for it.
            patience = 0.0
        if self._time.carried() + pause - began > patience:
            return False
        return not self._stopping.wait(pause)

    def _give_up(self, error: BaseException, jobs: int) -> None:
        # Once for an absence, however many callers meet it.
        if self._in_doubt():
            _log.error("commit_in_doubt", jobs=jobs, why=faults.summary(error))
        elif not self._away:
            _log.error("commit_failed", jobs=jobs, why=faults.summary(error))
        self._away = True

    def _failure(self, error: BaseException) -> UnavailableError:
        if not self._in_doubt():
            return faults.unavailable(error)
        return UnavailableError(
            "The database went away while this was being written, and whether it was is not known; "
            "look before you try again.",
            retry_after_seconds=faults.RETRY_AFTER_SECONDS,
        )

    def _once(self, group: Sequence[Job]) -> list[_Outcome]:
        """Try the transaction once."""
        asked = self._time.carried()
        with self._engine.connect() as connection:
            transaction = connection.begin()
            head = self._dialect.head(connection)
            self._time.observe(
                self._time.system() if head.seconds is None else head.seconds, asked=asked
            )
            known = self._look_up(connection)
            if known is not None:
                # Where this is on every disk that it has to be on, so is what came before it.
                transaction.commit()
                return known
            mark = self._dialect.mark(connection)
            outcomes = list(_run_each(connection, group))
            for job in group:
                failpoints.before(job.step)
            try:
                # One that failed alone took the transaction with it.
                if transaction.is_active:
                    transaction.commit()
            except DBAPIError as error:
                if error.connection_invalidated and mark is not None:
                    self._doubt = (mark, outcomes)
                raise
        for job in group:
            failpoints.after(job.step)
        return outcomes

    def _look_up(self, connection: sa.Connection) -> list[_Outcome] | None:
        """Return the outcomes of a commit whose answer was lost; None if it is to be done again.

        This transaction holds the lock of all writers, so that one has ended.
        """
        if self._doubt is None:
            return None
        mark, outcomes = self._doubt
        committed = self._dialect.committed(connection, mark)
        _log.warning("commit_looked_up", committed=committed)
        if committed:
            return outcomes
        if committed is None:
            raise _UnknownError
        self._doubt = None
        return None


def _run_each(connection: sa.Connection, group: Sequence[Job]) -> Iterator[_Outcome]:
    for job in group:
        try:
            # A function that is alone needs no savepoint, whose two statements cost as much as it.
            with connection.begin_nested() if len(group) > 1 else _rolled_back(connection):
                result = job.statement(connection)
        except DBAPIError as error:
            if faults.may_pass(error):
                # The whole transaction is gone with it.
                raise
            yield _Outcome(job, error=faults.told(error))
        except Exception as error:  # noqa: BLE001 - belongs to the caller
            yield _Outcome(job, error=error)
        else:
            yield _Outcome(job, result)


@contextlib.contextmanager
def _rolled_back(connection: sa.Connection) -> Iterator[None]:
    """Undo the whole transaction where the block fails."""
    try:
        yield
    except BaseException:
        connection.rollback()
        raise
