"""Life of a process: settings, logs, traces, metrics, signals, drain."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NoReturn

import prometheus_client
import uvloop

from services.kit import log, telemetry
from services.kit.parent import stop_with_parent
from services.kit.settings import SettingsError

DRAIN_SECONDS: Final = 10.0
"""Grace for calls that run when a service is told to stop."""


def run(service: str, serve: Callable[[asyncio.Event], Awaitable[None]]) -> NoReturn:
    """Run a service until SIGTERM or SIGINT, then exit.

    Args:
        service: its name, for logs, traces and metrics.
        serve: holds the service's resources; returns once the event is set and it has drained.
            A `SettingsError` that it raises becomes one line on standard error and exit 2.
    """
    log.configure(service, os.environ.get("NIGHTSHIFT_LOG_LEVEL", "INFO"))
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
        sys.stderr.write(f"nightshift {service}: {error}\n")
        sys.exit(2)
    finally:
        flush_traces()
    sys.exit(0)


def serve_metrics(listen: str) -> None:
    """Serve Prometheus metrics on `host:port`, from a thread of its own; empty means not at all."""
    if not listen:
        return
    host, _, port = listen.rpartition(":")
    prometheus_client.start_http_server(int(port), addr=host)


def read_secret(path: Path) -> str:
    """Return the fleet's shared secret.

    Raises:
        SettingsError: the file is missing or empty.
    """
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise SettingsError(
            f"the services' secret cannot be read from {path.name}: {error.strerror}; "
            "NIGHTSHIFT_SECRET_FILE names its file"
        ) from error
    if not secret:
        raise SettingsError(f"the services' secret in {path.name} is empty")
    return secret
