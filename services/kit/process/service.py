"""Life of a process: settings, logs, traces, metrics, signals, drain."""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NoReturn

import prometheus_client
import uvloop

from services.kit.process import log, telemetry
from services.kit.process.addresses import split_address
from services.kit.process.parent import stop_with_parent
from services.kit.process.settings import SettingsError

_log = log.get_logger(__name__)

MOST_DESCRIPTORS: Final = 65_536
DRAIN_SECONDS: Final = 10.0
"""Grace for calls that run when a service is told to stop."""


def run(service: str, serve: Callable[[asyncio.Event], Awaitable[None]]) -> NoReturn:
    """Run a service until SIGTERM or SIGINT, then exit.

    Args:
        service: its name, for logs, traces and metrics.
        serve: holds the service's resources; returns once the event is set and it has drained.
            A `SettingsError` that it raises becomes one line on standard error and exit 2, anything
            else an event of the log and exit 1.
    """
    _read_command_line(service)
    try:
        log.configure(service, os.environ.get("NIGHTSHIFT_LOG_LEVEL", "INFO"))
    except ValueError as error:
        _refuse(service, str(error))
    raise_descriptor_limit()
    flush_traces = telemetry.configure(service)

    async def main() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        async with contextlib.AsyncExitStack() as stack:
            watcher = asyncio.create_task(stop_with_parent(stopping))
            stack.callback(watcher.cancel)
            await serve(stopping)

    try:
        uvloop.run(main())
    except SettingsError as error:
        _refuse(service, str(error))
    except Exception:  # noqa: BLE001 - whatever it is, it is told as a line like any other
        _log.exception("service_failed")
        sys.exit(1)
    finally:
        flush_traces()
    sys.exit(0)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files as far as it may; return it.

    The usual soft limit of 1,024 is there for programs that use `select`, which nothing here does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def _read_command_line(service: str) -> None:
    """End where there is anything on it: all is said by settings, and a word would go unheard."""
    words = sys.argv[1:]
    # As `nightshift SERVICE`, which reads its own.
    if words in ([], [service]):
        return
    usage = (
        f"usage: nightshift {service}; its settings are variables NIGHTSHIFT_{service.upper()}_…, "
        "see docs/operations.md\n"
    )
    if words in (["-h"], ["--help"]):
        sys.stdout.write(usage)
        sys.exit(0)
    sys.stderr.write(usage)
    sys.exit(2)


def _refuse(service: str, why: str) -> NoReturn:
    sys.stderr.write(f"nightshift {service}: {why}\n")
    sys.exit(2)


def serve_metrics(listen: str, setting: str) -> None:
    """Serve Prometheus metrics on `host:port`, from a thread of its own; empty means not at all.

    Raises:
        SettingsError: the port is taken, or the address is not this machine's; `setting` names it.
    """
    if not listen:
        return
    host, port = split_address(listen)
    try:
        prometheus_client.start_http_server(port, addr=host)
    except OSError as error:
        raise SettingsError(
            f"cannot serve metrics on {listen}: {error.strerror}; {setting} names another address"
        ) from None


def read_secret(
    path: Path, what: str = "the services' secret", setting: str = "NIGHTSHIFT_SECRET_FILE"
) -> str:
    """Return the fleet's shared secret, or another one that a setting names the file of.

    Raises:
        SettingsError: the file is missing or empty, or holds no text.
    """
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise SettingsError(
            f"{what} cannot be read from {path}: {error.strerror}; {setting} names its file"
        ) from error
    except UnicodeDecodeError:
        # Without its cause, which quotes what it read.
        raise SettingsError(
            f"{what} in {path} is no text: make it of letters and digits, such "
            f"as `openssl rand -hex 32` prints; {setting} names its file"
        ) from None
    if not secret:
        raise SettingsError(f"{what} in {path} is empty")
    return secret
