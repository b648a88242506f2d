"""A store that dies or stands still at a named place, and a client that goes on as clients do.

A story brings a store to some steps. It is told twice: once each of their places kills the store,
which is started again, as `up` or an orchestrator would; once a store is stopped at each of them,
the next one on the same database and blobs takes over, and in the end all of them go on where they
stood.
"""

import asyncio
import inspect
import itertools
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from protos.nightshift.v1 import admin_pb2, models_pb2
from services.kit.calls import rpc
from services.kit.process.tasks import end
from services.kit.wire.errors import NightshiftError, UnavailableError
from tests.integration.crash_windows import at_rest
from tests.integration.store_work.worker import Worker
from tests.kit.eventually import eventually
from tests.kit.ports import free_port
from tests.kit.store import MODEL, POOL, our_errors
from tests.kit.template import Copied, Template

T = TypeVar("T")
Call = Callable[["Asker"], Awaitable[T]]
Check = Callable[[], Awaitable[None]]

WITHIN_SECONDS: Final = 120.0
_keys: Final = itertools.count(1)


class Asker(Worker):
    """A client whose creations carry an Idempotency-Key, if it is given one."""

    key: str | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        secret = self.store.secret_file.read_text().strip()  # type: ignore[attr-defined]  # a `Member`
        return rpc.metadata(secret, project_id=self.project_id, idempotency_key=self.key)


@dataclass(frozen=True)
class Backing:
    """What stores of a world share: settings that name a database and a place for blobs."""

    environment: Mapping[str, str] = field(default_factory=dict)
    database_url: str = ""
    blob_folder: Path | None = None
    secret_file: Path | None = None

    @property
    def several_stores(self) -> bool:
        """Whether more than one store can work on it."""
        return bool(self.database_url)


class Member:
    """One store process of a world; `address` and `data` are what clients look at."""

    def __init__(self, world: "World", name: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.data = world.folder / ("data" if not world.backing.several_stores else name)
        self.secret_file = world.backing.secret_file or self.data / "secret"
        self.process = Copied(
            world.template,
            "services.store.main",
            {
                "NIGHTSHIFT_STORE_DATA_DIR": str(self.data),
                "NIGHTSHIFT_STORE_LISTEN": self.address,
                "NIGHTSHIFT_LOG_LEVEL": "WARNING",
                # Nobody listens there.
                "NIGHTSHIFT_NATS_URL": "nats://127.0.0.1:9",
                **world.backing.environment,
                **world.environment,
            },
            world.folder / f"{name}.log",
            constants=world.constants,
        )


class World:
    """Stores, and whoever asks them."""

    def __init__(
        self,
        template: Template,
        folder: Path,
        *,
        action: str,
        places: tuple[str, ...],
        backing: Backing | None = None,
    ) -> None:
        """Describe it.

        Args:
            template: what store processes are copies of.
            folder: of its own.
            action: `kill` or `freeze`.
            places: where, as `STEP:before` or `STEP:after`.
            backing: what its stores share.
        """
        self.template = template
        self.folder = folder
        self.backing = backing or Backing()
        self.environment: dict[str, str] = {}
        # A store that stands still is waited for as long as its leases last.
        self.constants: dict[str, object] = {
            "services.store.ending.finalizer._LEASE_MS": 1_000,
            "services.store.webhooks.delivery_loop.LEASE_MS": 1_500,
            # In a story the same work ends many stores.
            "services.store.domain.retry_budget._LONGEST_MS": 200,
        }
        self._action = action
        self._places = places
        self._reached = folder / "reached"
        self._at_end: list[Callable[[], None]] = []
        self._armed = False
        # How often a store was started again.
        self.starts = 0
        self._members: list[Member] = []
        self._clients: dict[str, Asker] = {}
        self._moved = asyncio.Event()
        self._guard: asyncio.Task[None] | None = None
        self._stragglers: list[asyncio.Future[object]] = []

    @property
    def member(self) -> Member:
        """The store that is asked now."""
        return self._members[-1]

    @property
    def data(self) -> Path:
        """The data directory of the store that is asked now."""
        return self.member.data

    @property
    def reached(self) -> bool:
        """Whether stores have died or stopped at all places."""
        return len(list(self._reached.iterdir())) == len(self._places)

    def blobs(self) -> list[Path]:
        """Every blob that is there."""
        return at_rest.blob_files(self.blob_folder)

    @property
    def blob_folder(self) -> Path:
        """Where all its stores keep blobs."""
        return self.backing.blob_folder or self.data / "blobs"

    @property
    def database_url(self) -> str:
        """Where all its stores keep rows."""
        return self.backing.database_url or f"sqlite:///{self.data / 'nightshift.db'}"

    def sql(self, *statements: str) -> None:
        """Change rows behind the stores' backs."""
        at_rest.change(self.database_url, *statements)

    def sql_one(self, query: str) -> int:
        """Look at the first value that a query finds."""
        return at_rest.look(self.database_url, query)

    # --- for stories -----------------------------------------------------------------------------

    def set(self, **environment: str) -> None:
        """Give stores that start from now on these settings."""
        self.environment.update(environment)

    def at_end(self, call: Callable[[], None]) -> None:
        """Have something done when all is over."""
        self._at_end.append(call)

    async def start(self, armed: str = "") -> None:
        """Start the first store; `armed` places act each time they are passed."""
        await self.start_nothing()
        if not self.backing.several_stores and not (self.data / "nightshift.db").exists():
            # Making the schema is a story of its own.
            shutil.copy(at_rest.migrated(), self.data / "nightshift.db")
        self.member.process.start({"NIGHTSHIFT_FAILPOINTS": armed})
        if not armed:
            await self.ready()

    async def arm(self, prepare: Callable[[], None] | None = None) -> None:
        """Start the store anew, so that it dies or stops at the places.

        Args:
            prepare: called while no store runs.
        """
        if self._members:
            await self.member.process.kill()
        else:
            await self.start_nothing()
        if prepare is not None:
            prepare()
        self._armed = True
        # A place acts once, whichever store comes there first.
        self.environment |= {
            "NIGHTSHIFT_FAILPOINTS": ";".join(f"{each}={self._action}" for each in self._places),
            "NIGHTSHIFT_FAILPOINTS_DIR": str(self._reached),
        }
        self.member.process.environment |= self.environment
        self.member.process.start()
        guard = self._start_again() if self._action == "kill" else self._take_over()
        self._guard = asyncio.create_task(guard)

    async def arm_for_good(self) -> None:
        """Start the store anew, so that it dies at the places whenever it comes there."""
        await self.member.process.kill()
        self.member.process.environment["NIGHTSHIFT_FAILPOINTS"] = ";".join(
            f"{each}={self._action}" for each in self._places
        )
        self._guard = asyncio.create_task(self._start_again())

    async def start_nothing(self) -> None:
        """Name the first store without running it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._reached.mkdir(exist_ok=True)
        self._members = [Member(self, "store-0")]
        self.member.data.mkdir(exist_ok=True)

    async def ready(self) -> None:
        """Wait until the store that is asked answers and knows a model."""
        model = models_pb2.Model(id=MODEL, pool_id=POOL)

        async def put(asker: Asker) -> None:
            with our_errors():
                await asker.admin.PutModels(
                    admin_pb2.PutModelsRequest(models=[model]), metadata=asker.metadata
                )

        await self.do(put)

    async def do(self, call: Call[T], *, key: str | None = None) -> T:
        """Ask as an ordinary client: again while the store is away, elsewhere once it hangs.

        Raises:
            NightshiftError: the store's answer, whatever it is but UNAVAILABLE.
            AssertionError: no answer within `WITHIN_SECONDS`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WITHIN_SECONDS
        why: object = "it never answered"
        while loop.time() < deadline:
            self._check_guard()
            self._moved.clear()
            moved = asyncio.create_task(self._moved.wait())
            asked = asyncio.ensure_future(call(self._asker(key)))
            await asyncio.wait(
                (moved, asked),
                timeout=deadline - loop.time(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            moved.cancel()
            if not asked.done():
                # The one who asked has no more patience; the call itself goes on.
                self._stragglers.append(asked)
                continue
            try:
                return asked.result()
            except (UnavailableError, FileNotFoundError) as fault:
                why = fault
                await asyncio.sleep(0.02)
        raise AssertionError(f"no answer: {why!r}\n{self.logs()}")

    async def created(self, call: Call[T]) -> T:
        """Ask under a new Idempotency-Key."""
        return await self.do(call, key=f"key-{next(_keys)}")

    async def until(self, condition: Callable[[], T | Awaitable[T]]) -> T:
        """Wait until something holds; whatever asks the store does it through `do`."""

        async def holds() -> T:
            self._check_guard()
            found = condition()
            return await found if inspect.isawaitable(found) else found  # type: ignore[no-any-return]  # as it is typed

        try:
            return await eventually(holds, within_seconds=WITHIN_SECONDS, every_seconds=0.02)
        except AssertionError as error:
            error.add_note(self.logs())
            raise

    def logs(self) -> str:
        """The end of what its stores logged."""
        return "\n".join(
            f"--- {member.data.name}\n{member.process.log()[-3_000:]}" for member in self._members
        )

    # --- what happens meanwhile ------------------------------------------------------------------

    def _asker(self, key: str | None = None) -> Asker:
        name = f"{self.member.address} {key}"
        if name not in self._clients:
            self._clients[name] = asker = Asker(self.member)  # type: ignore[arg-type]  # the same two attributes
            asker.key = key
        return self._clients[name]

    def _check_guard(self) -> None:
        if self._guard is not None and self._guard.done():
            self._guard.result()

    async def _start_again(self) -> None:
        """What `up` does: start what has ended."""
        process = self.member.process
        while True:
            if not process.runs:
                self.starts += 1
                process.start()
            await asyncio.sleep(0.01)

    async def _take_over(self) -> None:
        """Start another store whenever the last one stands still, and send everybody there."""
        while True:
            if self.member.process.frozen:
                other = Member(self, f"store-{len(self._members)}")
                other.data.mkdir()
                other.process.start()
                self._members.append(other)
                self._moved.set()
            await asyncio.sleep(0.01)

    # --- the end ---------------------------------------------------------------------------------

    async def play(self, story: Callable[["World"], Awaitable[Check]]) -> None:
        """Tell a story, let what stood still go on, and check all there is to check."""
        try:
            check = await story(self)
            assert self._armed, "the story armed nothing"
            await check()
            await self._go_on()
            await check()
            self._check_guard()
            reached = sorted(each.name for each in self._reached.iterdir())
            assert reached == sorted(self._places), f"never came to its place\n{self.logs()}"
            await self._stop_guard()
            for member in self._members:
                await member.process.stop()
            await at_rest.check_all(
                self.database_url, self.blob_folder, self.data, self.backing.secret_file
            )
        except Exception as error:
            error.add_note(self.logs())
            raise
        finally:
            await self.close()

    async def _go_on(self) -> None:
        """Let what stood still go on; what it had begun ends, one way or the other."""
        *stood, _ = self._members
        for member in stood:
            member.process.send(signal.SIGCONT)
        done = await asyncio.gather(*self._stragglers, return_exceptions=True)
        for each in done:
            assert not isinstance(each, Exception) or isinstance(each, NightshiftError), each
        for member in stood:
            await member.process.stop()

    async def _stop_guard(self) -> None:
        if self._guard is not None:
            await end(self._guard)

    async def close(self) -> None:
        """End everything."""
        await self._stop_guard()
        await end(*self._stragglers)
        for asker in self._clients.values():
            await asker.channel.close()
        for member in self._members:
            await member.process.kill()
        for call in self._at_end:
            call()
