"""What operators' commands share: the store of a data directory, running or not."""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from services.cli.shared import which_system
from services.cli.shared.datadir import DataDir, DataDirError, DataDirInUseError
from services.cli.shared.openai_client import REFUSED, fail
from services.cli.shared.ports import FreePorts, is_open
from services.cli.up.environment import import_path
from services.cli.up.fleet import StoreAt
from services.cli.up.plan import Address
from services.kit.process.parent import VARIABLE as DIE_WITH_PARENT
from services.kit.process.service import read_secret
from services.kit.process.settings import SettingsError
from services.kit.wire.errors import NightshiftError, UnavailableError

_START_SECONDS: Final = 120.0
"""Bound on the start of a store: a large database may have to be migrated first."""
_STOP_SECONDS: Final = 20.0
_NO_BROKER: Final = "nats://127.0.0.1:1"
"""Nobody listens there. A store that is up for a moment must not meet some other fleet's broker."""

Command = TypeVar("Command", bound=Callable[..., Any])
T = TypeVar("T")


def store_options(command: Command) -> Command:
    """Add `--data` and `--store`, which arrive as `data` and `store`."""
    data = click.option(
        "--data",
        type=click.Path(file_okay=False, path_type=Path),
        envvar=which_system.DATA_DIR,
        default=Path("nightshift-data"),
        show_default=True,
        help="The directory of `nightshift up`, whether it runs or not.",
    )
    store = click.option(
        "--store",
        metavar="HOST:PORT",
        help="The store to ask, where it runs alone; NIGHTSHIFT_SECRET_FILE names the secret.",
    )
    return data(store(command))


def ask(
    data: Path,
    store: str | None,
    question: Callable[[StoreAt], Awaitable[T]],
    *,
    make: bool = False,
) -> T:
    """Ask the store, starting it for the moment where nothing runs; ends the command on a refusal.

    Args:
        data: the data directory.
        store: `host:port` of a store that runs alone; None means the directory's own.
        question: called with the store.
        make: whether a directory that is not there yet is made.
    """
    try:
        with _store(data, store, make=make) as there:

            async def asked() -> T:
                return await question(there)

            return asyncio.run(asked())
    except UnavailableError:
        where = f"at {store}" if store else f"of {data}"
        fail(f"the store {where} does not answer; is it starting? Try again", REFUSED)
    except (DataDirError, SettingsError, NightshiftError) as error:
        fail(str(error), REFUSED)


@contextlib.contextmanager
def _store(data: Path, store: str | None, *, make: bool) -> Iterator[StoreAt]:
    named = os.environ.get("NIGHTSHIFT_SECRET_FILE")
    if store is not None:
        _check_open(store)
        yield StoreAt(store, read_secret(Path(named) if named else data / "secret"))
        return
    if not make and not data.is_dir():
        raise DataDirError(f"there is nothing at {data}: name the directory with --data")
    directory = DataDir(data)
    source = click.get_current_context().get_parameter_source("data")
    is_named = source is ParameterSource.COMMANDLINE
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(directory.locked())
        except DataDirInUseError:
            which_system.check_running(directory, os.environ, is_named=is_named)
            secret = read_secret(Path(named)) if named else directory.read_secret()
            running = directory.read_address("store")
            _check_open(running)
            yield StoreAt(running, secret)
            return
        settings: dict[str, str] = {}
        if is_named:
            settings = which_system.to_ask(directory, os.environ, may_be_new=True)
        else:
            which_system.of_environment(os.environ)
        secret_file = Path(named).absolute() if named else directory.ensure_secret()
        elsewhere = which_system.to_note(directory, {**os.environ, **settings})
        address = stack.enter_context(_started(directory, secret_file, settings))
        if elsewhere:
            directory.write_addresses(elsewhere)
        yield StoreAt(str(address), read_secret(secret_file))


def _check_open(address: str) -> None:
    """Find out at once that nobody is there: a call would wait for it.

    Raises:
        UnavailableError: nobody listens.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and int(port) < 65_536):
        raise DataDirError(f"--store takes HOST:PORT, such as 127.0.0.1:7401; not {address!r}")
    if not is_open(Address(host.strip("[]"), int(port))):
        raise UnavailableError("nobody listens there")


@contextlib.contextmanager
def _started(
    directory: DataDir, secret_file: Path, settings: Mapping[str, str]
) -> Iterator[Address]:
    """Run a store on a directory that is locked for us.

    Args:
        directory: whose system it is.
        secret_file: holds the services' secret.
        settings: the store's, where they are other than the environment's.

    Raises:
        DataDirError: it does not start; its own words say why.
    """
    address = FreePorts(random.Random()).take()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.store.main"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={
                **os.environ,
                **settings,
                "NIGHTSHIFT_STORE_LISTEN": str(address),
                "NIGHTSHIFT_STORE_DATA_DIR": str(directory.root),
                "NIGHTSHIFT_SECRET_FILE": str(secret_file),
                "NIGHTSHIFT_NATS_URL": _NO_BROKER,
                DIE_WITH_PARENT: str(os.getpid()),
                "PYTHONPATH": import_path(os.environ),
            },
        )
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not is_open(address):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise DataDirError(_said(log.read().decode(errors="replace")))
                time.sleep(0.02)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _said(log: str) -> str:
    """Return why a store ended: the line that it wrote for people, or else its last one."""
    lines = log.strip().splitlines()
    prefix = "nightshift store: "
    spoken = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    return (spoken or lines or ["the store did not start"])[-1]
