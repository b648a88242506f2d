"""Which faults of a database pass by themselves, so that the same work is worth doing again."""

from typing import Final

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, ProgrammingError

from services.kit.wire.errors import InvalidRequestError, UnavailableError

RETRY_AFTER_SECONDS: Final = 1

# Classes of PostgreSQL's codes: connections, transactions undone, resources, the operator, the
# system. Then single ones: ended while idle or for its length, lock not got in time, a standby.
_PASSING_CLASSES: Final = ("08", "40", "53", "57", "58")
_PASSING_STATES: Final = frozenset({"25P03", "25P04", "55P03", "25006"})
_DISK_FULL: Final = "53100"
# Who is not known, a database that is not there, and one in which nothing may be made.
_REFUSED: Final = ("28", "3D", "42501")
_DATA_CLASS: Final = "22"

_ADDRESS: Final = "NIGHTSHIFT_STORE_DATABASE_URL"
_LET_IN: Final = (
    f"the server does not let this user in: user and password are those of {_ADDRESS} (or "
    "PGPASSFILE); correct them and start the store again, or let the user in at the server"
)
_MAKE_IT: Final = (
    f"make that database at the server, or have {_ADDRESS} name another one and start the store "
    "again"
)
_ENCRYPT: Final = f"see sslmode and the certificates in {_ADDRESS}, and what the server offers"
_LOOK: Final = f"see whether the server is started, and whether {_ADDRESS} names it"
# By the first words that a refusal has.
_MENDS: Final = (
    ("authentication failed", _LET_IN),
    ("no password supplied", _LET_IN),
    ("pg_hba.conf", _LET_IN),
    ('role "', _LET_IN),
    ('database "', _MAKE_IT),
    ("SSL", _ENCRYPT),
    ("certificate", _ENCRYPT),
)

# SQLite's primary codes: busy, locked, no memory, I/O, full, cannot open, locking protocol.
_FULL: Final = 13
_CANNOT_OPEN: Final = 14
# Read-only, damaged, cannot open, no database.
_UNUSABLE_SQLITE: Final = frozenset({8, 11, _CANNOT_OPEN, 26})
_PASSING_SQLITE: Final = frozenset({5, 6, 7, 10, _FULL, _CANNOT_OPEN, 15})


def may_pass(error: BaseException) -> bool:
    """Tell whether doing the whole transaction again can help, at once or later."""
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    state = _sqlstate(error)
    if state is not None:
        return state.startswith(_PASSING_CLASSES) or state in _PASSING_STATES
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _PASSING_SQLITE
    # Without a code it is the client's own: no connection, or none any more.
    return isinstance(error, OperationalError | InterfaceError)


def worth_awaiting(error: BaseException) -> bool:
    """Tell whether a start waits for a fault to pass; a file that cannot be opened stays so."""
    return may_pass(error) and _sqlite_code(error) != _CANNOT_OPEN


def is_of_settings(error: BaseException) -> bool:
    """Tell whether an operator has to name another database, or be let into this one."""
    state, code = _sqlstate(error), _sqlite_code(error)
    if state is not None:
        return state.startswith(_REFUSED)
    if code is not None:
        return code in _UNUSABLE_SQLITE
    # Without a code it is the client's own: an option of the address that it does not know.
    return isinstance(error, ProgrammingError)


def unavailable(error: BaseException) -> UnavailableError:
    """Return what callers are told of a fault that did not pass in time; the log has the rest."""
    if isinstance(error, UnavailableError):
        return error
    full = _sqlstate(error) == _DISK_FULL or _sqlite_code(error) == _FULL
    why = "has no room left" if full else "cannot be reached or written right now"
    return UnavailableError(
        f"The database {why}; try again.", retry_after_seconds=RETRY_AFTER_SECONDS
    )


def told(error: BaseException) -> BaseException:
    """Return a statement's failure as its caller is told of it."""
    if may_pass(error):
        return unavailable(error)
    if (_sqlstate(error) or "").startswith(_DATA_CLASS):
        return InvalidRequestError("A value of this request is longer or larger than can be kept.")
    return error


def summary(error: BaseException) -> str:
    """Return the first line of a fault, for the log; no statement, no values, no address."""
    original = getattr(error, "orig", None) or error
    return f"{type(original).__name__}: {original}".splitlines()[0][:300]


def mend(error: BaseException) -> str:
    """Return what an operator can do about a database that cannot be had at a start.

    A refusal has no code before there is a connection, and is known by its words. Where a server
    speaks another language they are its own, and what is said holds of any.
    """
    words = summary(error)
    return next((advice for needle, advice in _MENDS if needle in words), _LOOK)


def _sqlstate(error: BaseException) -> str | None:
    state: str | None = getattr(getattr(error, "orig", None), "sqlstate", None)
    return state


def _sqlite_code(error: BaseException) -> int | None:
    code: int | None = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
