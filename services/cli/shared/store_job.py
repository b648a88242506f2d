"""Work on a store's data that only the store knows how to do, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from services.cli.shared import which_system
from services.cli.shared.datadir import DataDir, DataDirError
from services.cli.shared.openai_client import INTERRUPTED, fail
from services.cli.shared.secret_options import from_file
from services.cli.up.environment import import_path

CANNOT: Final = 2
"""Exit status where it cannot be done, or cannot be told."""

Said = dict[str, Any]
Command = TypeVar("Command", bound=Callable[..., Any])


def place_options(command: Command) -> Command:
    """Add what says which store is meant; `place` makes the store's settings of it."""
    data = click.option(
        "--data",
        type=click.Path(file_okay=False, path_type=Path),
        envvar=which_system.DATA_DIR,
        default=Path("nightshift-data"),
        show_default=True,
        help="The directory of `nightshift up`.",
    )
    database = click.option(
        "--database-url",
        metavar="URL",
        callback=from_file(which_system.VARIABLES[which_system.DATABASE], _has_password),
        help="Where its rows are, if not there, or @FILE with that; without --data "
        "NIGHTSHIFT_STORE_DATABASE_URL says.",
    )
    blobs = click.option(
        "--blobs-url",
        metavar="URL",
        help="Where its blobs are, if not there; without --data NIGHTSHIFT_STORE_BLOBS_URL says.",
    )
    return data(database(blobs(command)))


def _has_password(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return bool(parts.password) or "password=" in parts.query


def place(data: Path, database_url: str | None, blobs_url: str | None) -> dict[str, str]:
    """Return the store's settings for what was asked for, as variables; ends on a contradiction.

    A directory that is named is meant as it is, whatever the environment says of other places:
    else a command that names a directory could reach the store that the environment is for.
    """
    options = {which_system.DATABASE: database_url, which_system.BLOBS: blobs_url}
    given = {which_system.VARIABLES[what]: url for what, url in options.items() if url is not None}
    source = click.get_current_context().get_parameter_source("data")
    meant = {name: url for name, url in os.environ.items() if name not in given}
    if source is not ParameterSource.COMMANDLINE:
        which_system.of_environment(meant)
    elif given:
        # Whoever names one of the two means the other, if not named, as it is in the directory.
        given = {**dict.fromkeys(which_system.VARIABLES.values(), ""), **given}
    else:
        try:
            given = which_system.to_ask(DataDir(data), meant, may_be_new=False)
        except DataDirError as error:
            fail(str(error), CANNOT)
    return {**given, "NIGHTSHIFT_STORE_DATA_DIR": str(data.absolute())}


def run(arguments: list[str], settings: Mapping[str, str], take: Callable[[Said], None]) -> int:
    """Run a module of the store, hand on what it says, and return its exit status.

    Args:
        arguments: the module and its arguments.
        settings: variables to set on top of ours.
        take: called with each JSON line as it comes.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, **settings, "PYTHONPATH": import_path(os.environ)},
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                take(json.loads(line))
        return process.wait()
    except KeyboardInterrupt:
        # It has heard the same signal.
        process.wait()
        return INTERRUPTED
