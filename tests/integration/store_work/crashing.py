"""Stores in this process that die, or stand still, at a step that a test names.

A place is `STEP:before` or `STEP:after` of `docs/durability.md`. What dies there does nothing more,
and nobody hears its answer. What stands still there goes on when it is told to.
"""

import asyncio
import itertools
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol, TypeVar

from services.kit.process.clock import ManualClock
from services.kit.wire.errors import UnavailableError
from services.store.blobs.base import Content
from services.store.blobs.local import LocalBlobs
from services.store.context import Context
from services.store.db import migrate
from services.store.db.database import Database, Statement
from services.store.settings import StoreSettings
from tests.integration.store_work.harness import SECRET, Store, keep_fake_time, serving
from tests.kit.postgres import StoreDatabases
from tests.kit.store_model_parts import Moment

T = TypeVar("T")


class DiedError(UnavailableError):
    """The store is dead."""


class Gate:
    """A place where one task stands still."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()


class Plan:
    """What is to happen to one store."""

    def __init__(self) -> None:
        self.died = asyncio.Event()
        self._crash = ""
        self._gates: dict[str, Gate] = {}

    def crash_at(self, place: str) -> None:
        """Die there."""
        self._crash = place

    def freeze_at(self, place: str) -> Gate:
        """Let the first task that comes there stand still."""
        return self._gates.setdefault(place, Gate())

    def disarm(self) -> None:
        """Let everybody pass from now on."""
        self._crash = ""
        self._gates.clear()

    async def reach(self, place: str) -> None:
        """Pass a place."""
        if place == self._crash:
            self.died.set()
        gate = self._gates.pop(place, None)
        if gate is not None and not self.died.is_set():
            gate.reached.set()
            await gate.open.wait()
        if self.died.is_set():
            raise DiedError("This store is dead.")


class CrashingDatabase(Database):
    """A database whose every write passes two places."""

    def __init__(self, url: str, plan: Plan, clock: ManualClock) -> None:
        super().__init__(url, clock=clock)
        keep_fake_time(self)
        self.plan = plan

    async def write(self, step: str, statement: Statement[T]) -> T:
        await self.plan.reach(f"{step}:before")
        result = await super().write(step, statement)
        await self.plan.reach(f"{step}:after")
        return result


class CrashingBlobs(LocalBlobs):
    """A directory of blobs whose every change passes two places."""

    def __init__(self, root: Path, plan: Plan) -> None:
        super().__init__(root)
        self.plan = plan

    async def put(self, step: str, name: str, content: Content) -> int:
        await self.plan.reach(f"{step}:before")
        size = await super().put(step, name, content)
        await self.plan.reach(f"{step}:after")
        return size

    async def delete(self, step: str, *names: str) -> None:
        await self.plan.reach(f"{step}:before")
        await super().delete(step, *names)
        await self.plan.reach(f"{step}:after")


class Ground(Protocol):
    """Where stores keep what they share."""

    stores: int

    def fresh(self, folder: Path) -> str:
        """Return the URL of a database that holds a schema and nothing else."""
        ...

    def release(self) -> None:
        """Take back the last one; no store works on it any more."""
        ...


class SQLiteGround:
    """A file for one store."""

    stores = 1

    def __init__(self, folder: Path) -> None:
        self._template = folder / "template.db"
        folder.mkdir(parents=True, exist_ok=True)
        _migrate(f"sqlite:///{self._template}")

    def fresh(self, folder: Path) -> str:
        shutil.copy(self._template, folder / "nightshift.db")
        return f"sqlite:///{folder / 'nightshift.db'}"

    def release(self) -> None:
        """It goes with its folder."""


class PostgresGround:
    """A database for two stores, beside a directory that they share."""

    stores = 2

    def __init__(self, databases: StoreDatabases) -> None:
        self._databases = databases

    def fresh(self, folder: Path) -> str:
        url = self._databases.take()
        _migrate(url)
        return url

    def release(self) -> None:
        self._databases.give_back()


def _migrate(url: str) -> None:
    database = Database(url)
    migrate.upgrade(database.writer_engine, int(ManualClock().now()))
    database.close()


class Member:
    """One store, dead or alive."""

    plan: Plan
    store: Store

    def __init__(
        self, url: str, folder: Path, clock: ManualClock, new_id: Callable[[], str]
    ) -> None:
        self._url = url
        self._folder = folder
        self._clock = clock
        self._new_id = new_id
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Start, as a new process does."""
        self.plan = Plan()
        database = CrashingDatabase(self._url, self.plan, self._clock)
        self._stack.callback(database.close)
        context = Context(
            db=database,
            blobs=CrashingBlobs(self._folder / "blobs", self.plan),
            clock=self._clock,
            new_id=self._new_id,
            settings=StoreSettings(data_dir=self._folder, max_attempts=1_000),
            wake=lambda _name: None,
        )
        self.store = await self._stack.enter_async_context(serving(context, self._clock))
        # From its first look at the database on it hears of executors.
        await Database.write(database, "leader.lead", lambda _connection: None)

    def moment(self) -> Moment:
        """Its time."""
        time = self.store.context.db.time
        return Moment(time.now_ms(), time.heard_since_ms)

    async def stop(self) -> None:
        """End at once."""
        self.plan.died.set()
        await self._stack.aclose()

    async def crash(self) -> None:
        """End at once, and start again."""
        await self.stop()
        await self.start()


class Fleet:
    """All stores on one database and one directory, under one clock."""

    def __init__(self, ground: Ground, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "secret").write_text(SECRET)
        (folder / "secret").chmod(0o600)
        self.folder = folder
        self.ground = ground
        self.clock = ManualClock()
        # Names that are the same each time, so that an example can be shown again.
        numbers = itertools.count(1)
        self.url = ground.fresh(folder)
        self.members = [
            Member(self.url, folder, self.clock, lambda: f"{next(numbers):032x}")
            for _ in range(ground.stores)
        ]

    async def start(self) -> None:
        """Start all, with an executor known."""
        for member in self.members:
            await member.start()
        for executor in ("e0", "e1"):
            await self.members[0].store.register(executor)

    async def stop(self) -> None:
        """End all."""
        for member in self.members:
            await member.stop()
        self.ground.release()

    def now_ms(self) -> int:
        """The stores' time."""
        return int(self.clock.now() * 1000)
