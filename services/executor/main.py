"""Entry point of the executor: settings, engine, bus, store, then work until told to stop."""

import asyncio
import contextlib
import random
from typing import NoReturn

from services.executor.engines.base import Engine
from services.executor.executor import LEAVING_SECONDS, Executor, Identity
from services.executor.exit_in_time import end_in_time
from services.executor.settings import ExecutorSettings
from services.executor.store_client import StoreClient
from services.kit.calls import rpc
from services.kit.calls.interceptors import ErrorsInterceptor, TelemetryInterceptor
from services.kit.messages import bus
from services.kit.messages.bus_login import Login, login_of
from services.kit.process import service, tasks
from services.kit.process.clock import SystemClock
from services.kit.process.log import get_logger
from services.kit.process.settings import SettingsError
from services.kit.wire import ids

_log = get_logger(__name__)


def make_engine(settings: ExecutorSettings, incarnation: str) -> Engine:
    """Return the engine that the settings name, not started; `incarnation` is this process's id.

    Raises:
        SettingsError: the engine does not take such settings.
    """
    if settings.engine == "vllm":
        # Imported only here: it takes seconds and needs packages that others do not have.
        from services.executor.engines.vllm.engine import VllmEngine

        (name, path), *others = settings.model_paths.items()
        return VllmEngine(
            model=path,
            served_name=name,
            # Other names with a place of their own are adapters, which the arguments name.
            aliases=[alias for alias, place in others if place == path],
            engine_args=settings.engine_arguments,
            default_max_tokens=settings.default_max_tokens,
        )
    from services.executor.engines.simulated.engine import SimulatedEngine
    from services.executor.engines.simulated.started_log import StartedFile

    if settings.engine_arguments:
        raise SettingsError(
            "the simulated engine takes no arguments; unset NIGHTSHIFT_EXECUTOR_ENGINE_ARGS"
        )
    if settings.started_dir is None:
        return SimulatedEngine()
    try:
        started = StartedFile(settings.started_dir, f"{settings.name}.{incarnation}")
    except OSError as error:
        raise SettingsError(
            f"NIGHTSHIFT_EXECUTOR_STARTED_DIR: {settings.started_dir} cannot be written: "
            f"{error.strerror}"
        ) from None
    return SimulatedEngine(started=started)


async def serve(stopping: asyncio.Event) -> None:
    """Run the executor until `stopping` is set and it has drained."""
    settings = ExecutorSettings.load()
    secret = service.read_secret(settings.secret_file)
    login = login_of(settings, "executor")
    incarnation = ids.uuid7_hex()
    engine = make_engine(settings, incarnation)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        server = await rpc.start_server(
            settings.listen,
            [],
            [TelemetryInterceptor(), ErrorsInterceptor()],
            setting="NIGHTSHIFT_EXECUTOR_LISTEN",
        )
        stack.push_async_callback(server.drain, 1.0)
        # It listens from the start, and is ready when its engine is.
        await server.set_ready(False)
        service.serve_metrics(settings.metrics_listen, "NIGHTSHIFT_EXECUTOR_METRICS_LISTEN")
        channel = rpc.open_channel(settings.store)
        stack.push_async_callback(channel.close)
        connected = await _connect(settings, login, stopping)
        if connected is None:
            return
        stack.push_async_callback(connected.close)
        executor = Executor(
            Identity(
                executor_id=settings.name,
                pool_id=settings.pool_id,
                models=tuple(settings.model_paths),
                line_timeout_seconds=settings.line_timeout_seconds,
                drain_seconds=settings.drain_seconds,
                stall_limit_seconds=settings.stall_seconds,
            ),
            engine=engine,
            bus=connected,
            store=StoreClient(
                channel, secret=secret, executor_id=settings.name, incarnation=incarnation
            ),
            clock=SystemClock(),
            chance=random.random,
            on_ready=server.set_ready,
        )
        _log.info(
            "executor_started",
            executor=settings.name,
            incarnation=incarnation,
            pool=settings.pool_id,
        )
        ending = asyncio.create_task(
            end_in_time(stopping, settings.drain_seconds + LEAVING_SECONDS + 1.0)
        )
        stack.callback(ending.cancel)
        await executor.run(stopping)


async def _connect(
    settings: ExecutorSettings, login: Login | None, stopping: asyncio.Event
) -> bus.Bus | None:
    """Connect to the bus, however long that takes; None when told to stop meanwhile."""
    connecting = asyncio.create_task(
        bus.connect(settings.nats_url, settings.name, replicas=settings.nats_replicas, login=login)
    )
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({connecting, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if connecting.done():
        return connecting.result()
    await tasks.end(connecting)
    return None


def main() -> NoReturn:
    """Run an executor with settings from the environment."""
    service.run("executor", serve)


if __name__ == "__main__":
    main()
