"""A small whole system, of which executors or schedulers die or stand still at named places.

What dies is started again, as `up` does; beside what stands still another one of its kind begins,
and in the end all of them go on where they stood.
"""

import asyncio
import contextlib
import hashlib
import inspect
import signal
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import nats
import nats.js.errors
import orjson

from protos.nightshift.v1 import batches_pb2
from services.kit.messages import bus
from services.kit.messages.subjects import durable_of
from services.kit.process.tasks import end
from services.store.checkup import doctor
from services.store.settings import StoreSettings
from tests.kit.eventually import eventually
from tests.kit.nats_server import NatsServer
from tests.kit.ports import free_port
from tests.kit.store import POOL, Client, chat_line
from tests.kit.template import Copied, Template

T = TypeVar("T")
Json = dict[str, object]
Story = Callable[["Fleet"], Awaitable[None]]

WITHIN_SECONDS: Final = 120.0
COMPLETED: Final = batches_pb2.BATCH_STATUS_COMPLETED
_CONSTANTS: Final[dict[str, dict[str, object]]] = {
    "store": {},
    "scheduler": {"services.scheduler.leader.TTL_SECONDS": 1.5},
    # A message is kept from coming again after so long.
    "executor": {"services.executor.chunks.keep_alive.IN_PROGRESS_SECONDS": 0.5},
}


class Fleet:
    """A broker, a store, schedulers and executors."""

    def __init__(
        self, template: Template, folder: Path, *, kind: str, action: str, places: tuple[str, ...]
    ) -> None:
        """Describe it.

        Args:
            template: what its processes are copies of.
            folder: of its own.
            kind: of the process that comes to the places: `executor` or `scheduler`.
            action: `kill` or `freeze`.
            places: as `STEP:before` or `STEP:after`.
        """
        self.nats = NatsServer(folder / "nats")
        self.data = folder / "data"
        self.address = f"127.0.0.1:{free_port()}"
        self.client: Client | None = None
        self._template = template
        self._folder = folder
        self._kind = kind
        self._action = action
        self._places = places
        self._reached = folder / "reached"
        self._running: dict[str, Copied] = {}
        self._guard: asyncio.Task[None] | None = None
        self._batches: dict[str, int] = {}

    # --- for stories -----------------------------------------------------------------------------

    async def open(self) -> None:
        """Start broker and store, and one scheduler and executor, one of them armed."""
        for folder in (self.data, self._reached):
            folder.mkdir(parents=True)
        await asyncio.to_thread(self.nats.start)
        store = self._process("store", "store")
        self._running["store"] = store
        store.start()
        self.client = Client(self)  # type: ignore[arg-type]  # `address` and `data` are what it looks at
        await self.client.ready()

    def begin(self) -> None:
        """Start a scheduler and an executor, one of which is armed."""
        for kind in ("scheduler", "executor"):
            self._add(kind)
        guard = self._start_again() if self._action == "kill" else self._take_over()
        self._guard = asyncio.create_task(guard)

    @property
    def armed_name(self) -> str:
        """The name of the process that comes to the places now."""
        return max(
            (name for name in self._running if name.startswith(self._kind)),
            key=lambda name: int(name.rpartition("-")[2]),
        )

    @property
    def armed(self) -> Copied:
        """The process that comes to the places now."""
        return self._running[self.armed_name]

    async def tell_to_stop(self) -> None:
        """Send the armed process a SIGTERM, and wait until it stands still or is started again."""
        process, pid = self.armed, self.armed.pid
        process.send(signal.SIGTERM)
        await self.until(lambda: process.frozen or process.pid != pid)
        if self._action == "freeze":
            await self.until(lambda: self.armed is not process)

    @property
    def reached(self) -> bool:
        """Whether it has died or stopped at all places."""
        return len(list(self._reached.iterdir())) == len(self._places)

    async def batch(
        self, lines: int, *, first: dict[str, object] | None = None, **how: object
    ) -> str:
        """Create a batch of lines that the engine answers as `how` says; return its id."""
        assert self.client is not None
        content = b"".join(
            chat_line(
                f"r{number}",
                f"line {number}",
                x_simulate=first if first is not None and not number else how,
            )
            for number in range(lines)
        )
        file = await self.client.upload(content)
        batch = await self.client.create(file.id)
        self._batches[batch.id] = lines
        return batch.id

    async def completed(self, batch_id: str) -> None:
        """Wait until a batch is completed."""

        async def is_completed() -> bool:
            assert self.client is not None
            return (await self.client.get(batch_id)).status == COMPLETED

        await self.until(is_completed)

    async def remove_queue(self) -> None:
        """Have the pool's queue deleted at the broker, if it is there."""
        connection = await nats.connect(self.nats.url)
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await connection.jetstream().delete_consumer(bus.WORK_STREAM, durable_of(POOL))
        await connection.close()

    async def until(self, condition: Callable[[], T | Awaitable[T]]) -> T:
        """Wait until something holds."""

        async def holds() -> T:
            if self._guard is not None and self._guard.done():
                self._guard.result()
            found = condition()
            return await found if inspect.isawaitable(found) else found  # type: ignore[no-any-return]  # as it is typed

        return await eventually(holds, within_seconds=WITHIN_SECONDS, every_seconds=0.05)

    async def restart(self) -> None:
        """Start the armed process anew."""
        await self.armed.kill()
        if self._action == "freeze":
            self.armed.start()

    def holds_work(self) -> int:
        """How many attempts the armed executor has, as the store's rows say."""
        return self._count(
            "SELECT count(*) FROM attempts WHERE executor_id = ? AND closed_ms IS NULL",
            self.armed_name,
        )

    def leads(self) -> int:
        """Whether the armed scheduler leads, as the store's rows say."""
        return self._count("SELECT count(*) FROM leadership WHERE holder = ?", self.armed_name)

    def _count(self, query: str, *values: str) -> int:
        with sqlite3.connect(self.data / "nightshift.db") as rows:
            return int(rows.execute(query, values).fetchone()[0])

    def damage_queue(self) -> None:
        """Spoil what the broker keeps of the pool's consumer; it restarts meanwhile."""
        self.nats.stop()
        (state,) = (self._folder / "nats").glob("store/jetstream/*/streams/WORK/obs/*/o.dat")
        state.write_bytes(bytes(range(200)))
        self.nats.start()

    # --- what happens meanwhile ------------------------------------------------------------------

    def _add(self, kind: str) -> None:
        name = f"{kind}-{sum(one.startswith(kind) for one in self._running)}"
        process = self._process(kind, name)
        if kind == self._kind:
            # A place acts once, whichever process comes there first.
            process.environment |= {
                "NIGHTSHIFT_FAILPOINTS": ";".join(
                    f"{each}={self._action}" for each in self._places
                ),
                "NIGHTSHIFT_FAILPOINTS_DIR": str(self._reached),
            }
        self._running[name] = process
        process.start()

    def _process(self, kind: str, name: str) -> Copied:
        own = {
            "store": {
                "NIGHTSHIFT_STORE_LISTEN": self.address,
                "NIGHTSHIFT_STORE_DATA_DIR": str(self.data),
                "NIGHTSHIFT_STORE_LEASE_SECONDS": "2",
            },
            "scheduler": {
                "NIGHTSHIFT_SCHEDULER_LISTEN": f"127.0.0.1:{free_port()}",
                "NIGHTSHIFT_SCHEDULER_STORE": self.address,
                "NIGHTSHIFT_SCHEDULER_NAME": name,
            },
            "executor": {
                "NIGHTSHIFT_EXECUTOR_STORE": self.address,
                "NIGHTSHIFT_EXECUTOR_NAME": name,
                "NIGHTSHIFT_EXECUTOR_MODELS": "simulated",
                "NIGHTSHIFT_EXECUTOR_DRAIN_SECONDS": "0",
            },
        }[kind]
        shared = {
            "NIGHTSHIFT_NATS_URL": self.nats.url,
            "NIGHTSHIFT_SECRET_FILE": str(self.data / "secret"),
            "NIGHTSHIFT_LOG_LEVEL": "WARNING",
        }
        return Copied(
            self._template,
            f"services.{kind}.main",
            {**shared, **own},
            self._folder / f"{name}.log",
            constants=_CONSTANTS[kind],
        )

    async def _start_again(self) -> None:
        """What `up` does: start what has ended."""
        while True:
            for process in self._running.values():
                if not process.runs:
                    process.start()
            await asyncio.sleep(0.02)

    async def _take_over(self) -> None:
        """Start another one of its kind whenever the armed one stands still."""
        while True:
            if self.armed.frozen:
                self._add(self._kind)
            await asyncio.sleep(0.02)

    # --- the end ---------------------------------------------------------------------------------

    async def play(self, story: Story) -> None:
        """Tell a story, let what stood still go on, and check all there is to check."""
        try:
            await story(self)
            await self.until(lambda: self.reached)
            for batch_id in list(self._batches):
                await self.completed(batch_id)
                await self._check(batch_id)
            for process in self._running.values():
                process.send(signal.SIGCONT)
            # Whoever is there now works; what came back does no harm.
            await self.completed(await self.batch(20))
            await self._stop()
        except Exception as error:
            for name, process in self._running.items():
                error.add_note(f"--- {name}\n{process.log()[-3_000:]}")
            raise
        finally:
            await self._close()

    async def _check(self, batch_id: str) -> None:
        """Each line stands once with its own answer, and was counted once."""
        assert self.client is not None
        lines = self._batches[batch_id]
        batch = await self.client.get(batch_id)
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (lines, lines, 0)
        content = await self.client.download(batch.output_file_id)
        tokens = 0
        for number, text in enumerate(content.splitlines()):
            line = orjson.loads(text)
            body = line["response"]["body"]
            assert line["custom_id"] == f"r{number}"
            told = hashlib.sha256(f"line {number}".encode()).hexdigest()[:16]
            assert body["choices"][0]["message"]["content"] == f"sim-{told}"
            tokens += body["usage"]["completion_tokens"]
        assert content.count(b"\n") == lines
        assert batch.usage.output_tokens == tokens

    async def _stop(self) -> None:
        """Stop all in order, and see that nothing changed what had ended."""
        if self._guard is not None:
            self._guard.cancel()
        for kind in ("executor", "scheduler"):
            of_kind = [one for name, one in self._running.items() if name.startswith(kind)]
            await asyncio.gather(*(process.stop() for process in of_kind))
        for batch_id in self._batches:
            await self._check(batch_id)
        await self._running["store"].stop()
        said: list[object] = []
        settings = StoreSettings(data_dir=self.data)
        faults = await asyncio.to_thread(doctor.check, settings, said.append, deep=True)
        assert faults == 0, orjson.dumps(said, option=orjson.OPT_INDENT_2).decode()

    async def _close(self) -> None:
        if self._guard is not None:
            await end(self._guard)
        if self.client is not None:
            await self.client.channel.close()
        for process in self._running.values():
            await process.kill()
        self.nats.kill()


class Stories:
    """The stories of one kind of process; `tools/failpoints.py` reads the decorators."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._all: dict[str, tuple[Story, tuple[str, ...]]] = {}

    def windows(self, *steps: str) -> Callable[[Story], Story]:
        """Tell this story with processes that die at these steps, and with some that stop there."""

        def add(story: Story) -> Story:
            places = tuple(f"{step}:{at}" for step in steps for at in ("before", "after"))
            self._all[story.__name__] = (story, places)
            return story

        return add

    def names(self) -> list[str]:
        """The names of the stories."""
        return list(self._all)

    async def killed(self, name: str, template: Template, folder: Path) -> None:
        """Tell a story at whose places processes die, one after the other."""
        await self._tell(name, "kill", template, folder)

    async def frozen(self, name: str, template: Template, folder: Path) -> None:
        """Tell a story at whose places processes stand still, one after the other."""
        await self._tell(name, "freeze", template, folder)

    async def _tell(self, name: str, action: str, template: Template, folder: Path) -> None:
        story, places = self._all[name]
        fleet = Fleet(template, folder, kind=self._kind, action=action, places=places)
        await fleet.play(story)
