"""Entry point of the store: sole owner of metadata and blobs."""

import asyncio
import contextlib
import os
import random
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any, NoReturn

from protos.nightshift.v1 import (
    admin_pb2_grpc,
    batches_pb2_grpc,
    events_pb2_grpc,
    files_pb2_grpc,
    models_pb2_grpc,
    uploads_pb2_grpc,
    webhooks_pb2_grpc,
    work_pb2_grpc,
)
from services.kit import fsync
from services.kit.calls import rpc
from services.kit.calls.interceptors import (
    ErrorsInterceptor,
    SecretInterceptor,
    TelemetryInterceptor,
    TraceInterceptor,
)
from services.kit.messages.bus_login import login_of
from services.kit.process import service, tasks
from services.kit.process.clock import Clock, SystemClock
from services.kit.process.log import get_logger
from services.kit.process.loop import Loop
from services.kit.process.readiness import Readiness
from services.kit.secret_file import ensure_secret
from services.kit.wire import ids
from services.store import memory
from services.store.admin.models_servicer import AdminServicer, ModelsServicer
from services.store.batches.batches_servicer import BatchesServicer
from services.store.batches.validator import Validator
from services.store.blobs.where_kept import disk_of, open_blobs
from services.store.bus.bus_link import keep_bus
from services.store.bus.outbox import Outbox
from services.store.cleaning.sweeper import Sweeper
from services.store.context import Context, LoopName
from services.store.db import startup
from services.store.db.database import Database
from services.store.db.only_store import only_store, only_user
from services.store.domain.receivers import Receivers
from services.store.ending.ender import Ender
from services.store.ending.finalizer import Finalizer
from services.store.events.event_hub import EventHub
from services.store.events.events_servicer import EventsServicer
from services.store.files.files_servicer import FilesServicer
from services.store.files.uploads_servicer import UploadsServicer
from services.store.inputs.index_maker import IndexMaker
from services.store.inputs.input_reader import InputReader
from services.store.settings import StoreSettings
from services.store.webhooks.delivery_loop import Deliveries
from services.store.webhooks.sender import Sender
from services.store.webhooks.webhooks_servicer import WebhooksServicer
from services.store.work.poison import PoisonLines
from services.store.work.work_servicer import WorkServicer

_log = get_logger(__name__)

_TICK_SECONDS = 1.0
_SWEEP_SECONDS = 60.0
_TURN_SECONDS = 3.0
"""For turns of loops when the store is told to stop. They may wait for a bucket or a database that
is away for longer, or have a thousand batches to end."""
_PACKAGE = "nightshift.v1"
_WORK = f"{_PACKAGE}.Work"


def main() -> NoReturn:
    """Run the store until it is told to stop."""
    # What it keeps is users' content and secrets of webhooks.
    os.umask(0o077)
    memory.prepare()
    service.run("store", _serve)


async def _serve(stopping: asyncio.Event) -> None:
    settings = StoreSettings.load()
    clock = SystemClock()
    async with contextlib.AsyncExitStack() as stack:
        with startup.using(settings.data_dir, "NIGHTSHIFT_STORE_DATA_DIR"):
            fsync.make(settings.data_dir)
        secret = _secret(settings)
        login = login_of(settings, "store")
        db = _database(stack, settings, clock)
        if not await startup.prepare(db, stopping):
            return
        loops: dict[LoopName, Loop] = {}
        context = _context(stack, settings, db, clock, loops)
        reader = InputReader(context.blobs, IndexMaker(context).make_again, clock)
        outbox = Outbox(db)
        sender = Sender(allow_private=settings.webhooks_allow_private)
        await stack.enter_async_context(sender)
        receivers = Receivers()
        deliveries = Deliveries(context, sender, receivers, chance=random.random)
        stack.push_async_callback(deliveries.close)
        hub = EventHub(db)
        _start_loops(stack, loops, context, reader, outbox, deliveries, hub)
        await stack.enter_async_context(
            _in_background(keep_bus(settings, login, outbox, loops["outbox"].wake))
        )
        service.serve_metrics(settings.metrics_listen, "NIGHTSHIFT_STORE_METRICS_LISTEN")
        webhooks = WebhooksServicer(context, sender, receivers)
        server = await _listen(context, secret, _entries(context, reader, webhooks, hub))

        def end_streams() -> None:
            hub.close()
            context.draining.set()

        stack.push_async_callback(server.drain, service.DRAIN_SECONDS, end_streams)
        await stack.enter_async_context(_readiness(context, server).kept())
        await stopping.wait()


def _secret(settings: StoreSettings) -> str:
    """Return the fleet's secret, which is made where it is missing."""
    file = settings.secret_file or settings.data_dir / "secret"
    with startup.using(file, "NIGHTSHIFT_SECRET_FILE"):
        ensure_secret(file)
    return service.read_secret(file)


def _database(stack: contextlib.AsyncExitStack, settings: StoreSettings, clock: Clock) -> Database:
    """Open the database; of a file, as the only store that works on it."""
    db = Database(settings.sqlalchemy_url, durable=settings.durability == "full", clock=clock)
    stack.callback(db.close)
    if db.file is not None:
        with startup.using(settings.data_dir, "NIGHTSHIFT_STORE_DATA_DIR"):
            stack.enter_context(only_store(settings.data_dir))
        with startup.using(db.file, "NIGHTSHIFT_STORE_DATABASE_URL"):
            stack.enter_context(only_user(db.file, settings.data_dir))
    return db


def _context(
    stack: contextlib.AsyncExitStack,
    settings: StoreSettings,
    db: Database,
    clock: Clock,
    loops: Mapping[LoopName, Loop],
) -> Context:
    """Open the blobs and put together what every part is given; `loops` are there when it wakes."""
    with startup.using(settings.data_dir / "blobs", "NIGHTSHIFT_STORE_BLOBS_URL"):
        blobs = open_blobs(settings)
    stack.push_async_callback(blobs.close)
    running = asyncio.get_running_loop()

    def wake(name: LoopName) -> None:
        running.call_soon_threadsafe(loops[name].wake)

    return Context(
        db=db,
        blobs=blobs,
        clock=clock,
        new_id=ids.uuid7_hex,
        settings=settings,
        wake=wake,
        disk=disk_of(settings),
    )


async def _listen(
    context: Context, secret: str, entries: list[rpc.ServiceEntry]
) -> rpc.RunningServer:
    """Serve, as not ready: until the first look it takes nothing."""
    server = await rpc.start_server(
        context.settings.listen,
        entries,
        [
            TelemetryInterceptor(),
            SecretInterceptor(secret),
            TraceInterceptor(),
            ErrorsInterceptor(),
        ],
        setting="NIGHTSHIFT_STORE_LISTEN",
    )
    await server.set_ready(False)
    return server


def _readiness(context: Context, server: rpc.RunningServer) -> Readiness:
    looks = {
        "database": context.db.probe,
        "blobs": context.blobs.look,
        "disk": context.disk.require_room,
    }

    async def tell(missing: frozenset[str]) -> None:
        # With too little room on the disk, what runs still goes on.
        await server.set_ready(not missing, still=(_WORK,) if missing == {"disk"} else ())
        server.set_needs({name: name not in missing for name in looks})

    return Readiness(looks, tell)


def _start_loops(
    stack: contextlib.AsyncExitStack,
    loops: dict[LoopName, Loop],
    context: Context,
    reader: InputReader,
    outbox: Outbox,
    deliveries: Deliveries,
    hub: EventHub,
) -> None:
    turns: dict[LoopName, tuple[Callable[[], Awaitable[object]], float]] = {
        "outbox": (outbox.run_once, _TICK_SECONDS),
        "validator": (Validator(context, reader).run_once, _TICK_SECONDS),
        "ender": (Ender(context).run_once, _TICK_SECONDS),
        "poison": (PoisonLines(context, reader).run_once, _TICK_SECONDS),
        "finalizer": (Finalizer(context, reader).run_once, _TICK_SECONDS),
        "deliveries": (deliveries.run_once, _TICK_SECONDS),
        "events": (hub.run_once, _TICK_SECONDS),
        "sweeper": (Sweeper(context).run_once, _SWEEP_SECONDS),
        "time": (context.db.keep_time, _TICK_SECONDS),
    }
    for name, (run_once, tick_seconds) in turns.items():
        loops[name] = Loop(name, run_once, tick_seconds=tick_seconds)
    running = [asyncio.create_task(loop.run(), name=loop.name) for loop in loops.values()]
    stack.push_async_callback(_finish, loops.values(), running)


@contextlib.asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` until the block is left."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await tasks.end(task)


async def _finish(loops: Iterable[Loop], running: "Sequence[asyncio.Task[None]]") -> None:
    """Let turns in progress end, and break off those that take long: the next store does them."""
    for loop in loops:
        loop.stop()
    _, late = await asyncio.wait(running, timeout=_TURN_SECONDS)
    if late:
        _log.warning("turns_broken_off", loops=sorted(task.get_name() for task in late))
    await tasks.end(*running)


def _entries(
    context: Context, reader: InputReader, webhooks: WebhooksServicer, hub: EventHub
) -> list[rpc.ServiceEntry]:
    return [
        rpc.ServiceEntry(
            f"{_PACKAGE}.Files", FilesServicer(context), files_pb2_grpc.add_FilesServicer_to_server
        ),
        rpc.ServiceEntry(
            f"{_PACKAGE}.Uploads",
            UploadsServicer(context),
            uploads_pb2_grpc.add_UploadsServicer_to_server,
        ),
        rpc.ServiceEntry(
            f"{_PACKAGE}.Batches",
            BatchesServicer(context),
            batches_pb2_grpc.add_BatchesServicer_to_server,
        ),
        rpc.ServiceEntry(
            f"{_PACKAGE}.Events",
            EventsServicer(context, hub),
            events_pb2_grpc.add_EventsServicer_to_server,
        ),
        rpc.ServiceEntry(
            f"{_PACKAGE}.Models",
            ModelsServicer(context),
            models_pb2_grpc.add_ModelsServicer_to_server,
        ),
        rpc.ServiceEntry(
            f"{_PACKAGE}.Admin", AdminServicer(context), admin_pb2_grpc.add_AdminServicer_to_server
        ),
        rpc.ServiceEntry(
            f"{_PACKAGE}.Webhooks",
            webhooks,
            webhooks_pb2_grpc.add_WebhooksServicer_to_server,
        ),
        rpc.ServiceEntry(
            _WORK,
            WorkServicer(context, reader),
            work_pb2_grpc.add_WorkServicer_to_server,
        ),
    ]


if __name__ == "__main__":
    main()
