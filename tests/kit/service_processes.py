"""Services as real processes, several of each, on addresses that they keep when started again."""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx

from services.kit.calls import rpc
from tests.kit.eventually import eventually
from tests.kit.ports import free_address

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 40.0


class ServiceProcess:
    """One process; may be killed, frozen, stopped and started again."""

    def __init__(
        self, name: str, service: str, log: Path, settings: Mapping[str, str], address: str
    ) -> None:
        """Describe it; `start` runs it.

        Args:
            name: of the process.
            service: which one.
            log: appended to.
            settings: its environment on top of ours.
            address: where its health service listens.
        """
        self.name = name
        self.address = address
        self.settings = dict(settings)
        self.command: Sequence[str] = (sys.executable, "-m", f"services.{service}.main")
        self.process: subprocess.Popen[bytes] | None = None
        self._log = log

    @property
    def pid(self) -> int:
        """Return the process's id."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start it; `ready` waits for it."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.settings},
            )

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    async def ended(self) -> int:
        """Wait for its end; returns its exit status."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, STOP_SECONDS)

    async def kill(self) -> None:
        """SIGKILL it."""
        self.send(signal.SIGKILL)
        await self.ended()

    async def stop(self) -> int:
        """Let it drain; returns its exit status."""
        self.send(signal.SIGTERM)
        return await self.ended()

    async def restart(self) -> None:
        """Let it drain, and start it again."""
        assert await self.stop() == 0, self.log()
        self.start()

    async def is_serving(self) -> bool:
        """Tell whether its health service says that it takes work."""
        async with rpc.open_channel(self.address) as channel:
            return await rpc.is_serving(channel, timeout_seconds=2)

    async def ready(self, within_seconds: float = START_SECONDS) -> None:
        """Wait until it takes work."""
        try:
            await eventually(self.is_serving, within_seconds=within_seconds, every_seconds=0.05)
        except AssertionError as late:
            raise AssertionError(f"{self.name} is not ready; its log:\n{self.log()}") from late

    def log(self, size: int = 6_000) -> str:
        """Return the end of what it logged."""
        return self._log.read_text(errors="replace")[-size:]


class Gateway(ServiceProcess):
    """A gateway, which clients of two kinds ask."""

    http = ""

    @property
    def base_url(self) -> str:
        """Return what an OpenAI client takes."""
        return f"http://{self.http}/v1"

    async def readyz(self) -> int:
        """Return the status that load balancers see; 0 where nobody answers."""
        async with httpx.AsyncClient() as client:
            try:
                return (await client.get(f"http://{self.http}/readyz", timeout=5)).status_code
            except httpx.TransportError:
                return 0


class Services:
    """Processes that share a secret, a bus and addresses of stores."""

    def __init__(
        self, folder: Path, nats_url: str, settings: Mapping[str, str] | None = None
    ) -> None:
        """Describe a fleet without processes; `settings` go to all of them."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        # A port that a restarting service leaves for a moment is taken by nobody.
        self.processes: list[ServiceProcess] = []
        self.stores: list[ServiceProcess] = []
        secret_file = folder / "secret"
        self.secret = secrets.token_hex(32)
        secret_file.write_text(self.secret)
        self._settings = {
            "NIGHTSHIFT_SECRET_FILE": str(secret_file),
            "NIGHTSHIFT_NATS_URL": nats_url,
            **(settings or {}),
        }

    @property
    def store_list(self) -> str:
        """Return the addresses of all stores, as settings take them."""
        return ",".join(store.address for store in self.stores)

    def store(self, **settings: str) -> ServiceProcess:
        """Add a store; one that shares nothing with others unless the settings say so."""
        name = f"store-{len(self.stores)}"
        address = free_address()
        settings = {"DATA_DIR": str(self.folder / name), "LISTEN": address, **settings}
        store = self._add(ServiceProcess, name, "store", address, settings)
        self.stores.append(store)
        return store

    def scheduler(self, name: str, **settings: str) -> ServiceProcess:
        """Add a scheduler."""
        address = free_address()
        settings = {"LISTEN": address, "STORE": self.store_list, "NAME": name, **settings}
        return self._add(ServiceProcess, name, "scheduler", address, settings)

    def executor(self, name: str, **settings: str) -> ServiceProcess:
        """Add an executor with the simulated engine."""
        address = free_address()
        settings = {"LISTEN": address, "STORE": self.store_list, "NAME": name, **settings}
        return self._add(ServiceProcess, name, "executor", address, settings)

    def gateway(self, name: str, **settings: str) -> Gateway:
        """Add a gateway."""
        http, address = free_address(), free_address()
        settings = {
            "LISTEN": http,
            "GRPC_LISTEN": address,
            "STORE": self.store_list,
            **settings,
        }
        gateway = self._add(Gateway, name, "gateway", address, settings)
        assert isinstance(gateway, Gateway)
        gateway.http = http
        return gateway

    def _add(
        self,
        kind: type[ServiceProcess],
        name: str,
        service: str,
        address: str,
        settings: Mapping[str, str],
    ) -> ServiceProcess:
        prefix = f"NIGHTSHIFT_{service.upper()}_"
        process = kind(
            name,
            service,
            self.folder / f"{name}.log",
            {**self._settings, **{f"{prefix}{key}": to for key, to in settings.items()}},
            address,
        )
        self.processes.append(process)
        return process

    async def start(self, *processes: ServiceProcess) -> None:
        """Start these, or all, and wait until they take work."""
        for process in processes or self.processes:
            process.start()
        await asyncio.gather(*(process.ready() for process in processes or self.processes))

    async def close(self) -> None:
        """End all that still run, at once."""
        for process in self.processes:
            if process.process is not None and process.process.poll() is None:
                process.send(signal.SIGKILL)
                await process.ended()


@contextlib.asynccontextmanager
async def services(
    folder: Path, nats_url: str, settings: Mapping[str, str] | None = None
) -> AsyncIterator[Services]:
    """Have a fleet for one test; nothing of it runs after that."""
    fleet = Services(folder, nats_url, settings)
    try:
        yield fleet
    finally:
        await fleet.close()
