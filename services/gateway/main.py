"""Entry point of the gateway: `python -m services.gateway.main`."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Final, NoReturn

import uvicorn

from services.gateway.context import Context
from services.gateway.grpc.server import start_public_server
from services.gateway.keys import KeyAuth
from services.gateway.limits import RequestLimiter
from services.gateway.rest.app import create_app
from services.gateway.rest.protocol import Connections, protocol_of
from services.gateway.settings import GatewaySettings
from services.gateway.sites import Sites
from services.gateway.store import Store
from services.kit.calls import rpc
from services.kit.process import service
from services.kit.process.addresses import split_address
from services.kit.process.clock import SystemClock
from services.kit.process.log import get_logger
from services.kit.process.loop import Loop
from services.kit.process.settings import SettingsError
from services.kit.wire import ids
from services.kit.wire.errors import NightshiftError, UnavailableError

_log = get_logger(__name__)

READY_TICK_SECONDS: Final = 1.0
"""How often the public health service learns whether the store takes work."""

KEEP_ALIVE_SECONDS: Final = 75
"""Longer than clients keep an idle connection (httpx: 5 s), so that it is they who close it: a
request sent into a closing connection fails."""

BACKLOG: Final = 2_048
"""Connections that may wait to be accepted."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a running gateway listens; ports are the real ones."""

    http_port: int
    grpc_port: int


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process's own decide when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


@contextlib.asynccontextmanager
async def running(settings: GatewaySettings, secret: str) -> AsyncIterator[Listening]:
    """Serve both ports; leaving drains.

    Raises:
        SettingsError: a port is taken, or an address is not this machine's.
    """
    async with contextlib.AsyncExitStack() as stack:
        channel = rpc.open_channel(settings.store)
        stack.push_async_callback(channel.close)
        store, clock = Store(channel, secret), SystemClock()
        context = Context(
            store=store,
            auth=KeyAuth(store, clock),
            limiter=RequestLimiter(clock),
            requests_per_minute=settings.requests_per_minute,
            windows=settings.windows,
            new_id=ids.uuid7_hex,
            sites=Sites(settings.hosts),
        )
        listener = stack.enter_context(_listen(settings.listen))
        public = await start_public_server(context, settings.grpc_listen)
        stack.push_async_callback(public.drain, service.DRAIN_SECONDS)
        await stack.enter_async_context(_readiness(context, public))
        rest = await stack.enter_async_context(_http(context, listener))
        stack.push_async_callback(_drain, context, public, rest, settings.drain_delay_seconds)
        yield Listening(listener.getsockname()[1], public.port)


async def _drain(
    context: Context, public: rpc.RunningServer, rest: uvicorn.Server, seconds: float
) -> None:
    """Be ready no more, end streams of events, and close both doors at the same time.

    Before that, `seconds` are left to those who have to notice.
    """
    context.watchers.drain()
    await public.health.enter_graceful_shutdown()
    await asyncio.sleep(seconds)
    rest.should_exit = True
    await public.drain(service.DRAIN_SECONDS)


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {address}: {rpc.why_not(error)}; "
            "NIGHTSHIFT_GATEWAY_LISTEN names another address"
        ) from error


@contextlib.asynccontextmanager
async def _readiness(context: Context, public: rpc.RunningServer) -> AsyncIterator[None]:
    async def tell() -> None:
        await public.set_ready(await context.store.is_serving())

    loop = Loop("readiness", tell, tick_seconds=READY_TICK_SECONDS)
    await public.set_ready(False)
    task = asyncio.create_task(loop.run())
    try:
        yield
    finally:
        loop.stop()
        await task


@contextlib.asynccontextmanager
async def _http(context: Context, listener: socket.socket) -> AsyncIterator[uvicorn.Server]:
    config = uvicorn.Config(
        create_app(context),
        http=protocol_of(Connections(service.raise_descriptor_limit())),
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # Else whoever is on this machine names the address that it is counted by.
        proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(service.DRAIN_SECONDS),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if task.done():
                await task
                raise SettingsError("the HTTP server did not start")
            await asyncio.sleep(0.005)
        yield server
    finally:
        server.should_exit = True
        await task


async def refuse_open(settings: GatewaySettings, secret: str, stopping: asyncio.Event) -> None:
    """Refuse an address that other machines can reach where all who do could use it.

    Waits for a store that is away, since only the store knows whether there are keys.

    Raises:
        SettingsError: no key was ever made; the message says how to make one.
    """
    exposed = settings.exposed_address()
    if exposed is None:
        return
    name, address = exposed
    async with rpc.open_channel(settings.store) as channel:
        store = Store(channel, secret)
        while not stopping.is_set():
            try:
                answer = await store.look_up_key(b"")
            except UnavailableError:
                _log.warning("store_is_away", needed_for=name)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), READY_TICK_SECONDS)
                continue
            except NightshiftError as error:
                raise SettingsError(f"the store at {settings.store}: {error}") from error
            if answer.keys_needed:
                return
            raise SettingsError(
                f"{name} is {address}, which other machines can reach, and there is no API key, so "
                "that anyone there could use it. Make one with `nightshift keys create --project P "
                f"--store {settings.store}` (or `--data DIR` where `nightshift up` runs), listen "
                "on 127.0.0.1, or set NIGHTSHIFT_GATEWAY_ALLOW_OPEN=true where something in front "
                "of it decides who may call."
            )


async def serve(stopping: asyncio.Event) -> None:
    """Serve until told to stop.

    Raises:
        SettingsError: the environment does not fit.
    """
    settings = GatewaySettings.load()
    secret = service.read_secret(settings.secret_file)
    await refuse_open(settings, secret, stopping)
    if stopping.is_set():
        return
    service.serve_metrics(settings.metrics_listen, "NIGHTSHIFT_GATEWAY_METRICS_LISTEN")
    async with running(settings, secret) as listening:
        _log.info("listening", http_port=listening.http_port, grpc_port=listening.grpc_port)
        await stopping.wait()
        _log.info("stopping")


def main() -> NoReturn:
    """Run the gateway until SIGTERM or SIGINT."""
    service.run("gateway", serve)


if __name__ == "__main__":
    main()
