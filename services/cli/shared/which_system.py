"""Which system a data directory is of, so that no command acts on another without saying so.

A directory's system keeps its rows and blobs there, or where `NIGHTSHIFT_STORE_DATABASE_URL` and
`NIGHTSHIFT_STORE_BLOBS_URL` said when `nightshift up` ran on it first. What a directory holds or
says counts; the variables count for a new one, and give the address of one that is elsewhere.
"""

import re
import sys
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from services.cli.shared.datadir import DataDir, DataDirError

DATABASE: Final = "database"
BLOBS: Final = "blobs"
VARIABLES: Final = {
    DATABASE: "NIGHTSHIFT_STORE_DATABASE_URL",
    BLOBS: "NIGHTSHIFT_STORE_BLOBS_URL",
}
DATA_DIR: Final = "NIGHTSHIFT_STORE_DATA_DIR"
"""The directory of whoever names none, as for a store that runs alone."""
_CALLED: Final = {DATABASE: "database", BLOBS: "place for blobs"}
_SERVERS: Final = ("host", "port")
_SERVER: Final = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")
_UNREADABLE: Final = "an address that cannot be read"


def name_of(url: str) -> str:
    """Return an address without what only some may know: no user, no password, no options."""
    scheme, is_url, _ = url.partition("://")
    try:
        parts = urlsplit(url)
        # Servers of a PostgreSQL may be named there alone.
        servers = [f"{key}={value}" for key, value in parse_qsl(parts.query) if key in _SERVERS]
    except ValueError:
        return _UNREADABLE
    host = parts.netloc.rpartition("@")[2]
    # A password with a `/` or the like, which should have been escaped, goes on where others begin.
    is_plain = all(_SERVER.fullmatch(each) for each in host.split(","))
    if not is_url or not is_plain or (parts.netloc and "@" in parts.path + parts.fragment):
        return _UNREADABLE
    return "?".join(
        filter(None, (f"{scheme.partition('+')[0]}://{host}{parts.path}", "&".join(servers)))
    )


def to_start(directory: DataDir, environment: Mapping[str, str]) -> dict[str, str]:
    """Return where the `up` that is about to start keeps rows and blobs, as names.

    Raises:
        DataDirError: the directory's system keeps them elsewhere.
    """
    names = {}
    for what, variable in VARIABLES.items():
        url = _url(directory, what, environment)
        kept = _kept(directory, what)
        if kept == "" and url:
            raise DataDirError(
                f"{variable} is set, but {_theirs(directory, what)} is in it: unset the "
                "variable to go on with that, or name another directory with --data"
            )
        if kept and not url:
            raise _missing(directory, what, kept)
        names[what] = name_of(url) if url else ""
    return names


def to_ask(
    directory: DataDir, environment: Mapping[str, str], *, may_be_new: bool
) -> dict[str, str]:
    """Return the store's settings that mean a directory's system; say what is not used.

    Args:
        directory: one that was named.
        environment: ours.
        may_be_new: whether what the environment says counts for a directory that holds nothing.

    Raises:
        DataDirError: its system is elsewhere, and the environment does not say how to get there.
    """
    settings = {}
    for what, variable in VARIABLES.items():
        url = _url(directory, what, environment)
        kept = _kept(directory, what)
        if kept is None:
            kept = name_of(url) if url and may_be_new else ""
        if kept and not url:
            raise _missing(directory, what, kept)
        if kept and kept != name_of(url):
            raise DataDirError(
                f"{variable} names {name_of(url)}, but {_theirs(directory, what)} is {kept}: "
                "set it to that, or leave --data out to mean what the environment says"
            )
        if url and not kept:
            say(f"{variable} is set and not used: {_theirs(directory, what)} is in it")
        elif url:
            say(f"the {_CALLED[what]} is {kept}, as {variable} says")
        settings[variable] = url if kept else ""
    return settings


def to_note(directory: DataDir, settings: Mapping[str, str]) -> dict[str, str]:
    """Return what a directory must say of a system that is made for it elsewhere; else nothing.

    Without it, a later command without these settings would make another system there.
    """
    names = {
        what: name_of(settings[variable])
        for what, variable in VARIABLES.items()
        if settings.get(variable)
    }
    is_new = _kept(directory, DATABASE) is None and not directory.noted(BLOBS)
    return names if is_new else {}


def of_environment(environment: Mapping[str, str]) -> None:
    """Say that what the environment names is meant."""
    if data := environment.get(DATA_DIR):
        say(f"the directory is {data}, as {DATA_DIR} says")
    for what, variable in VARIABLES.items():
        if url := environment.get(variable):
            say(f"the {_CALLED[what]} is {name_of(url)}, as {variable} says")


def check_running(directory: DataDir, environment: Mapping[str, str], *, is_named: bool) -> None:
    """Say what the `up` that runs on a directory works on, where the environment says otherwise.

    Raises:
        DataDirError: nobody named the directory, so that either may be meant.
    """
    for what, variable in VARIABLES.items():
        url = _url(directory, what, environment)
        kept = _kept(directory, what) or ""
        if not url or kept == name_of(url):
            continue
        place = kept or "in it"
        if not is_named:
            raise DataDirError(
                f"{variable} names {name_of(url)}, and the `nightshift up` that runs on "
                f"{directory.root} has another {_CALLED[what]}, {kept or 'its own'}: name the "
                "one that you mean, with --data or --store"
            )
        say(f"{variable} is set and not used: {_theirs(directory, what)} is {place}")


def say(what: str) -> None:
    """Tell whoever typed the command."""
    print(f"nightshift: {what}", file=sys.stderr)


def _url(directory: DataDir, what: str, environment: Mapping[str, str]) -> str:
    """Return what the environment says, empty where that is in the directory itself."""
    url = environment.get(VARIABLES[what], "")
    database, blobs = directory.root / "nightshift.db", directory.root / "blobs"
    return "" if url in (f"sqlite:///{database}", blobs.as_uri()) else url


def _kept(directory: DataDir, what: str) -> str | None:
    """Return the name of where a directory's system has it; empty: there; None: there is none."""
    noted = directory.noted(what) or None
    if what == DATABASE:
        return "" if (directory.root / "nightshift.db").exists() else noted
    return "" if noted is None and (directory.root / "blobs").exists() else noted


def _theirs(directory: DataDir, what: str) -> str:
    return f"the {_CALLED[what]} of {directory.root}"


def _missing(directory: DataDir, what: str, kept: str) -> DataDirError:
    return DataDirError(
        f"{_theirs(directory, what)} is {kept}, and {VARIABLES[what]} is not set: set it as for "
        "the `nightshift up` that made it so, or name another directory with --data"
    )
