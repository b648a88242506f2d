"""Entry point of the scheduler: the leader dispatches, standbys wait for its lease."""

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from services.kit.calls import interceptors, rpc
from services.kit.messages import bus
from services.kit.messages.bus_login import login_of
from services.kit.process import service, tasks
from services.kit.process.clock import SystemClock
from services.kit.process.log import get_logger
from services.kit.process.readiness import Readiness
from services.kit.wire.ids import uuid7_hex
from services.scheduler.domain.policies.fifo import Fifo
from services.scheduler.scheduler import Scheduler
from services.scheduler.settings import SchedulerSettings
from services.scheduler.work_client import WORK_SERVICE, WorkClient

_log = get_logger(__name__)

T = TypeVar("T")


async def serve(settings: SchedulerSettings, stopping: asyncio.Event) -> None:
    """Run a scheduler until `stopping` is set, then drain.

    Raises:
        SettingsError: the secret cannot be read, or a port is taken.
    """
    secret = service.read_secret(settings.secret_file)
    login = login_of(settings, "scheduler")
    holder = settings.name or f"{socket.gethostname()}-{uuid7_hex()}"
    async with contextlib.AsyncExitStack() as stack:
        # Only health is served, and a standby is ready too: it takes over by itself.
        server = await rpc.start_server(
            settings.listen,
            [],
            [interceptors.TelemetryInterceptor()],
            setting="NIGHTSHIFT_SCHEDULER_LISTEN",
        )
        stack.push_async_callback(server.drain, 0)
        await server.set_ready(False)
        service.serve_metrics(settings.metrics_listen, "NIGHTSHIFT_SCHEDULER_METRICS_LISTEN")
        connecting = bus.connect(
            settings.nats_url, "scheduler", replicas=settings.nats_replicas, login=login
        )
        connection = await _unless(stopping, connecting)
        if connection is None:
            return
        stack.push_async_callback(connection.close)
        channel = rpc.open_channel(settings.store)
        stack.push_async_callback(channel.close)
        scheduler = Scheduler(
            bus=connection,
            client=WorkClient(channel, secret),
            policy=Fifo(),
            clock=SystemClock(),
            holder=holder,
            tick_seconds=settings.window_tick_seconds,
        )
        await stack.enter_async_context(_readiness(server, connection, channel).kept())
        _log.info("scheduler_started", holder=holder, port=server.port)
        await scheduler.run(stopping)


def _readiness(server: rpc.RunningServer, connection: bus.Bus, channel: rpc.Channel) -> Readiness:
    async def is_connected() -> bool:
        return connection.connected

    async def tell(missing: frozenset[str]) -> None:
        await server.set_ready(not missing)

    looks = {"bus": is_connected, "store": lambda: rpc.is_serving(channel, WORK_SERVICE)}
    return Readiness(looks, tell)


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` returns, or None when `stopping` is set first."""
    working = asyncio.create_task(work)
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if working.done():
        return working.result()
    await tasks.end(working)
    return None


def main() -> NoReturn:
    """Run the scheduler as the environment says."""

    async def run(stopping: asyncio.Event) -> None:
        await serve(SchedulerSettings.load(), stopping)

    service.run("scheduler", run)


if __name__ == "__main__":
    main()
