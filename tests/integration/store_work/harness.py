"""The store in this process, under a fake clock, its loops stepped by the test.

Everything is spoken to over a real gRPC server; database and blobs are real files.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from protos.nightshift.v1 import (
    admin_pb2_grpc,
    batches_pb2_grpc,
    events_pb2_grpc,
    files_pb2_grpc,
    models_pb2_grpc,
    uploads_pb2_grpc,
    work_pb2_grpc,
)
from services.kit.calls import rpc
from services.kit.calls.interceptors import ErrorsInterceptor, SecretInterceptor
from services.kit.process.clock import ManualClock
from services.kit.wire.ids import uuid7_hex
from services.store.admin.models_servicer import AdminServicer, ModelsServicer
from services.store.batches.batches_servicer import BatchesServicer
from services.store.batches.validator import Validator
from services.store.blobs.where_kept import open_blobs
from services.store.cleaning.sweeper import Sweeper
from services.store.context import Context
from services.store.db import migrate
from services.store.db.database import Database
from services.store.ending.ender import Ender
from services.store.ending.finalizer import Finalizer
from services.store.events.event_hub import EventHub
from services.store.events.events_servicer import EventsServicer
from services.store.files.files_servicer import FilesServicer
from services.store.files.uploads_servicer import UploadsServicer
from services.store.inputs.index_maker import IndexMaker
from services.store.inputs.input_reader import InputReader
from services.store.settings import StoreSettings
from services.store.work.poison import PoisonLines
from services.store.work.work_servicer import WorkServicer
from tests.integration.store_work.worker import Worker

SECRET = "a-secret-for-tests"


@dataclass(frozen=True)
class Address:
    """Where `tests.kit.store.Client` finds a store and its secret."""

    address: str
    data: Path


class Store(Worker):
    """A store in this process: its clock, its loops and its rows at hand."""

    def __init__(
        self, address: Address, context: Context, clock: ManualClock, hub: EventHub
    ) -> None:
        super().__init__(address)  # type: ignore[arg-type]  # the same two attributes
        self.hub = hub
        self.context = context
        self.clock = clock
        reader = reader_of(context)
        self.validator = Validator(context, reader)
        self.ender = Ender(context)
        self.poison = PoisonLines(context, reader)
        self.finalizer = Finalizer(context, reader)
        self.sweeper = Sweeper(context)

    # --- loops ------------------------------------------------------------------------------

    async def turn(self) -> None:
        """Let every loop take a turn, in the order in which batches move."""
        await self.validator.run_once()
        await self.ender.run_once()
        await self.poison.run_once()
        await self.finalizer.run_once()

    async def sql(self, query: Any) -> Sequence[Any]:
        """Look at rows that no door shows."""
        return await self.context.db.read(lambda connection: connection.execute(query).all())

    async def validated(self, batch_id: str) -> None:
        """Let the validator take a turn."""
        await self.validator.run_once()


def reader_of(context: Context) -> InputReader:
    """Return a reader as the store's main makes one."""
    return InputReader(context.blobs, IndexMaker(context).make_again, context.clock)


class Databases:
    """Where stores in this process keep their rows: in a file, or in what `make` makes."""

    def __init__(self) -> None:
        #: Makes an empty database and returns its address; None means a file in the folder.
        self.make: Callable[[], str] | None = None
        self._made: dict[Path, str] = {}

    def of(self, folder: Path) -> str:
        """Return the address of a folder's database, the same each time."""
        if self.make is None:
            return f"sqlite:///{folder / 'nightshift.db'}"
        if folder not in self._made:
            self._made[folder] = self.make()
        return self._made[folder]


databases = Databases()


def keep_fake_time(db: Database) -> None:
    """Take the test's clock for the database's: a server's own cannot be set."""
    dialect = db._dialect
    begun, pulse = dialect.head, dialect.pulse
    dialect.head = lambda connection: replace(begun(connection), seconds=None)  # type: ignore[method-assign]

    def pulse_only() -> None:
        pulse()

    dialect.pulse = pulse_only  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[Store]:
    """Serve a store on files below `folder`; started again there, it goes on."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    await asyncio.to_thread((folder / "secret").write_text, SECRET)
    clock = ManualClock()
    db = Database(await asyncio.to_thread(databases.of, folder))
    keep_fake_time(db)
    try:
        migrate.upgrade(db.writer_engine, int(clock.now()))
        chosen = StoreSettings(data_dir=folder, **settings)
        context = Context(
            db=db,
            blobs=open_blobs(chosen),
            clock=clock,
            new_id=uuid7_hex,
            settings=chosen,
            wake=lambda _name: None,
        )
        try:
            async with serving(context, clock) as store:
                await store.register()
                yield store
        finally:
            await context.blobs.close()
    finally:
        db.close()


@contextlib.asynccontextmanager
async def serving(context: Context, clock: ManualClock) -> AsyncIterator[Store]:
    """Serve a store of these resources, whose secret is in its data directory."""
    hub = EventHub(context.db)
    server = await rpc.start_server(
        "127.0.0.1:0",
        list(_entries(context, hub)),
        [SecretInterceptor(SECRET), ErrorsInterceptor()],
    )
    folder = context.settings.data_dir
    store = Store(Address(f"127.0.0.1:{server.port}", folder), context, clock, hub)
    try:
        yield store
    finally:
        await store.channel.close()
        await server.server.stop(None)


def _entries(context: Context, hub: EventHub) -> Iterator[rpc.ServiceEntry]:
    for name, servicer, add in (
        ("Files", FilesServicer(context), files_pb2_grpc.add_FilesServicer_to_server),
        ("Uploads", UploadsServicer(context), uploads_pb2_grpc.add_UploadsServicer_to_server),
        ("Batches", BatchesServicer(context), batches_pb2_grpc.add_BatchesServicer_to_server),
        ("Events", EventsServicer(context, hub), events_pb2_grpc.add_EventsServicer_to_server),
        ("Models", ModelsServicer(context), models_pb2_grpc.add_ModelsServicer_to_server),
        ("Admin", AdminServicer(context), admin_pb2_grpc.add_AdminServicer_to_server),
        (
            "Work",
            WorkServicer(context, reader_of(context)),
            work_pb2_grpc.add_WorkServicer_to_server,
        ),
    ):
        yield rpc.ServiceEntry(f"nightshift.v1.{name}", servicer, add)
