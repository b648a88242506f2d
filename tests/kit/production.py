"""A whole system of the production parts, each service started as its operator starts it.

PostgreSQL, S3 and a cluster of three NATS, two stores, two gateways, a leader and a standby, some
executors; or the same services on the embedded parts. Every connection passes a proxy of its own,
so that any process can be parted from any other.
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from tests.kit.backings import Backing, Blobs, Broker, Database, Member, freeze, start_again
from tests.kit.doctoring import doctor_check
from tests.kit.eventually import eventually
from tests.kit.kept_process import BY_SIGNAL, KeptProcess
from tests.kit.nats_cluster import NatsCluster
from tests.kit.ports import free_address
from tests.kit.service_processes import Gateway, ServiceProcess
from tests.kit.started_lines import started_to
from tests.kit.tcp_proxy import TcpProxy

READY_SECONDS: Final = 120.0

_REACHES: Final = {
    "gateway": ("store",),
    "scheduler": ("store", "nats"),
    "executor": ("store", "nats"),
    "store": ("nats", "postgres", "s3"),
}
_ORDER: Final = ("store", "gateway", "scheduler", "executor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a system is made of.

    Attributes:
        production: PostgreSQL, S3 and three NATS, or else SQLite, a directory and one NATS.
        stores: how many; one on SQLite.
        gateways: how many.
        schedulers: how many; all but one stand by.
        executors: how many, all of one pool.
    """

    production: bool = True
    stores: int = 2
    gateways: int = 2
    schedulers: int = 2
    executors: int = 2


PRODUCTION: Final = Parts()
APART: Final = Parts(production=False, stores=1)
"""What `up` runs, but with proxies between, two gateways and a standby."""


class ProductionSystem:
    """Processes, what they stand on, and the proxies between; a `tests.kit.system.System`."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        parts: Parts = PRODUCTION,
    ) -> None:
        """Describe it.

        Args:
            folder: everything is kept below it.
            environment: settings that all services get.
            parts: what it is made of.
        """
        self.started_dir = folder / "started"
        self._folder = folder
        self._environment = {
            **(environment or {}),
            **started_to(self.started_dir),
            "NIGHTSHIFT_SECRET_FILE": str(folder / "secret"),
            "NIGHTSHIFT_DIE_WITH_PARENT": str(os.getpid()),
        }
        self._parts = parts
        self._stack = contextlib.AsyncExitStack()
        self._backings: dict[str, Backing] = {}
        self._services: dict[str, KeptProcess] = {}
        self._listens: dict[str, str] = {}
        self._proxies: dict[tuple[str, str], TcpProxy] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    # --- what it is made of -----------------------------------------------------------------------

    @property
    def processes(self) -> dict[str, list[str]]:
        """Names by kind."""
        counts = {
            "store": self._parts.stores,
            "gateway": self._parts.gateways,
            "scheduler": self._parts.schedulers,
            "executor": self._parts.executors,
        }
        services = {kind: [f"{kind}-{n}" for n in range(many)] for kind, many in counts.items()}
        if self._parts.production:
            nats = [f"nats-{number}" for number in range(3)]
            return {**services, "nats": nats, "postgres": ["postgres"], "s3": ["s3"]}
        return {**services, "nats": ["nats"]}

    @property
    def reaches(self) -> dict[str, list[str]]:
        """What each kind can be parted from."""
        there = self.processes
        return {
            kind: [other for other in others if other in there] for kind, others in _REACHES.items()
        }

    @property
    def lasting(self) -> frozenset[str]:
        """All of them: S3 is kept from answering where others are killed."""
        return frozenset(self.processes)

    @property
    def base_urls(self) -> list[str]:
        """One for each gateway."""
        return [f"http://{self._listens[name]}/v1" for name in self.processes["gateway"]]

    def pid(self, name: str) -> int:
        """Return a process's id."""
        return self._services[name].pid if name in self._services else self._backings[name].pid

    # --- life -------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start everything; returns when every gateway is ready and the model is known."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "secret").write_text("0123456789abcdef" * 4)
        await self._start_backings()
        names = [(kind, name) for kind in _ORDER for name in self.processes[kind]]
        self._listens = {name: free_address() for _, name in names}
        for kind, name in names:
            self._services[name] = KeptProcess(await self._service(kind, name))
            self._services[name].start()
        async with httpx.AsyncClient(timeout=5) as client:

            async def all_serve() -> bool:
                return all([await _serves(client, url) for url in self.base_urls])

            await eventually(all_serve, within_seconds=READY_SECONDS)

    async def _start_backings(self) -> None:
        if self._parts.production:
            # Clients stay with the addresses that they are given, which are our proxies'.
            cluster = NatsCluster(self._folder / "nats", advertise=False)
            routes = [member.route for member in cluster.members]
            for number, member in enumerate(cluster.members):
                self._backings[f"nats-{number}"] = Member(member, routes)
            self._backings["postgres"] = Database()
            self._backings["s3"] = Blobs(self._folder / "s3")
        else:
            self._backings["nats"] = Broker(self._folder / "nats")
        for each in self._backings.values():
            self._stack.callback(each.end)
        starts = (asyncio.to_thread(each.start) for each in self._backings.values())
        await asyncio.gather(*starts)

    async def close(self) -> None:
        """Stop it in order. AssertionError where a service ends badly, or did before."""
        try:
            bad: dict[str, object] = {}
            for kind in reversed(_ORDER):
                names = [name for name in self.processes[kind] if name in self._services]
                stops = (self._services[name].stop() for name in names)
                statuses = await asyncio.gather(*stops)
                ended = zip(names, statuses, strict=True)
                bad |= {name: status for name, status in ended if status not in (0, *BY_SIGNAL)}
            bad |= {name: one.endings for name, one in self._services.items() if one.endings}
            assert not bad, f"ended with {bad}:\n{self.log_end(20_000)}"
        finally:
            for service in self._services.values():
                service.end()
            await self._stack.aclose()

    # --- settings ---------------------------------------------------------------------------------

    async def _service(self, kind: str, name: str) -> ServiceProcess:
        prefix = f"NIGHTSHIFT_{kind.upper()}_"
        own = {"LISTEN": self._listens[name]}
        shared: dict[str, str] = {}
        if kind == "store":
            own["DATA_DIR"] = str(self._folder / name)
            shared |= await self._stored(name)
        else:
            ports = [await self._link(name, store) for store in self.processes["store"]]
            own["STORE"] = ",".join(f"127.0.0.1:{port}" for port in ports)
        if kind == "gateway":
            own["GRPC_LISTEN"] = free_address()
        else:
            shared |= await self._nats(name)
        if kind in ("scheduler", "executor"):
            own["NAME"] = name
        made = Gateway if kind == "gateway" else ServiceProcess
        settings = {
            **self._environment,
            **shared,
            **{prefix + key: value for key, value in own.items()},
        }
        return made(name, kind, self._folder / f"{name}.log", settings, self._listens[name])

    async def _nats(self, name: str) -> dict[str, str]:
        ports = [await self._link(name, each) for each in self.processes["nats"]]
        urls = ",".join(f"nats://127.0.0.1:{port}" for port in ports)
        return {"NIGHTSHIFT_NATS_URL": urls, "NIGHTSHIFT_NATS_REPLICAS": str(len(ports))}

    async def _stored(self, name: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for other in ("postgres", "s3"):
            backing = self._backings.get(other)
            if isinstance(backing, Database | Blobs):
                found |= backing.environment(await self._link(name, other))
        return found

    async def _link(self, name: str, other: str) -> int:
        """Return the port on which `name` reaches `other`, through a proxy of their own."""
        backing = self._backings.get(other)
        port = int(self._listens[other].rpartition(":")[2]) if backing is None else backing.port
        proxy = TcpProxy(port)
        self._proxies[name, other] = proxy
        await self._stack.enter_async_context(proxy)
        return proxy.port

    # --- hits -------------------------------------------------------------------------------------

    async def kill(self, names: Sequence[str], seconds: float) -> None:
        """SIGKILL these; each comes back after `seconds`."""
        await asyncio.gather(*(self._kill(name, seconds) for name in names))

    async def _kill(self, name: str, seconds: float, *, wipe: bool = False) -> None:
        if name in self._services:
            await self._services[name].kill(seconds)
            return
        backing = self._backings[name]
        async with self._at(name):
            if backing.lasting:
                await asyncio.to_thread(backing.kill, wipe=wipe)
                await asyncio.sleep(seconds)
                await start_again(backing.start)
            else:
                with contextlib.ExitStack() as refusing:
                    for proxy in self._to(name):
                        refusing.enter_context(proxy.refusing())
                    await asyncio.sleep(seconds)

    async def freeze(self, names: Sequence[str], seconds: float) -> None:
        """SIGSTOP these for `seconds`."""
        await asyncio.gather(*(self._freeze(name, seconds) for name in names))

    async def _freeze(self, name: str, seconds: float) -> None:
        # What stands beneath is not both killed and frozen; services may be.
        async with self._at(name) if name in self._backings else contextlib.nullcontext():
            await freeze(self.pid(name), seconds)

    async def restart(self, names: Sequence[str]) -> None:
        """SIGTERM these; each starts again when it has ended."""
        hits = (
            self._services[name].restart() if name in self._services else self._kill(name, 0.0)
            for name in names
        )
        await asyncio.gather(*hits)

    async def part(self, name: str, kinds: Sequence[str], seconds: float) -> None:
        """Let nothing pass between `name` and these kinds for `seconds`."""
        others = [other for kind in kinds for other in self.processes[kind]]
        with contextlib.ExitStack() as parted:
            for other in others:
                parted.enter_context(self._proxies[name, other].parted())
            await asyncio.sleep(seconds)

    async def wipe(self, name: str, seconds: float) -> None:
        """Kill a broker and remove what it keeps; it comes back after `seconds`."""
        await self._kill(name, seconds, wipe=True)

    def _to(self, name: str) -> list[TcpProxy]:
        return [proxy for (_, other), proxy in self._proxies.items() if other == name]

    def _at(self, name: str) -> asyncio.Lock:
        """Return what keeps two hits on the same process apart."""
        return self._locks.setdefault(name, asyncio.Lock())

    # --- afterwards -------------------------------------------------------------------------------

    async def check(self) -> None:
        """Have all that is stored checked, while it runs."""
        database, blobs = self._backings.get("postgres"), self._backings.get("s3")
        if isinstance(database, Database) and isinstance(blobs, Blobs):
            settings = {**database.environment(database.port), **blobs.environment(blobs.port)}
            await doctor_check(settings)
        else:
            await doctor_check(self._folder / self.processes["store"][0], deep=True)

    def log_of(self, name: str) -> str:
        """Return all that a service logged."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def log_end(self, size: int = 6_000) -> str:
        """Return the end of each service's log."""
        each = max(size // max(len(self._services), 1), 400)
        logs = (f"--- {name}\n{one.log_end(each)}" for name, one in self._services.items())
        return "\n".join(logs)


async def _serves(client: httpx.AsyncClient, base_url: str) -> bool:
    """Tell whether a gateway takes batches, for a model that some executor has brought."""
    with contextlib.suppress(httpx.HTTPError):
        ready = await client.get(f"{base_url.removesuffix('/v1')}/readyz")
        models = await client.get(f"{base_url}/models")
        return ready.is_success and models.is_success and bool(models.json()["data"])
    return False
