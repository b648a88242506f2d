"""The seam between the store's statements and the database that they run on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa

OthersDead = Callable[[sa.Connection, Any], sa.ColumnElement[bool]]
"""`Dialect.others_dead`, for statements that take leases."""


@dataclass(frozen=True, slots=True)
class Head:
    """What the head of a write transaction has learned.

    Attributes:
        seconds: the database's time since the epoch; None where it is this machine's.
        transaction: the server's number of the transaction; None where an end is never in doubt.
    """

    seconds: float | None = None
    transaction: str | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """What a write transaction leaves behind, by which its commit can be looked up.

    Attributes:
        transaction: the server's number of it. A server that took over, or was restored from a
            copy, gives the same number to another transaction.
        nonce: what this transaction alone has written.
    """

    transaction: str
    nonce: str


class Dialect(Protocol):
    """A kind of database. Write transactions are serial on each, also those of several stores."""

    #: What this store's leases on rows are held by.
    holder: str

    #: Where it is a file of this machine.
    file: Path | None

    def writer(self) -> sa.Engine:
        """Return an engine of one connection, whose transactions begin as write transactions."""
        ...

    def readers(self, size: int) -> sa.Engine:
        """Return an engine of `size` connections, whose transactions see one snapshot each."""
        ...

    def head(self, connection: sa.Connection) -> Head:
        """Return what the open write transaction of `connection` began with."""
        ...

    def mark(self, connection: sa.Connection) -> Mark | None:
        """Write into the open transaction what tells later that it was committed.

        None where the end of a transaction is never in doubt.
        """
        ...

    def committed(self, connection: sa.Connection, mark: Mark) -> bool | None:
        """Tell whether the transaction of a mark was committed; None if nobody knows any more.

        To be asked in the next write transaction of this store, when the other one has ended for
        certain, and before that is marked itself. What was committed is as durable as it must be
        once that transaction is committed, too.
        """
        ...

    def forget_marks(self, connection: sa.Connection) -> None:
        """Delete the marks of stores that are gone."""
        ...

    def others_dead(self, connection: sa.Connection, holder: Any) -> sa.ColumnElement[bool]:
        """Return the condition that the column `holder` names a store that is dead for certain."""
        ...

    def pulse(self) -> float | None:
        """Show that this store lives, and return the database's time as `Head` does."""
        ...

    def erase(self) -> None:
        """Remove what was deleted from the database's log, unless somebody is using that."""
        ...

    def check(self, connection: sa.Connection) -> None:
        """Refuse a database that the store cannot work on.

        Raises:
            SettingsError: its version or encoding; the message says what to change.
        """
        ...

    def close(self) -> None:
        """Close what `pulse` holds."""
        ...
