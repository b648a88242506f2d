"""gRPC transport: the only place that knows channels, servers and the policy of each call."""

import asyncio
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.kit.calls.channels import (
    KEEPALIVE_SECONDS,
    OPTIONS,
    SPREAD_KEEPALIVE_SECONDS,
    open_channel,
)
from services.kit.calls.policies import POLICIES, CallPolicy
from services.kit.process import telemetry
from services.kit.process.addresses import split_address
from services.kit.process.settings import SettingsError

__all__ = [
    "API_KEY_ID_KEY",
    "IDEMPOTENCY_KEY",
    "KEEPALIVE_SECONDS",
    "OPERATOR_KEY",
    "POLICIES",
    "PROJECT_KEY",
    "REQUEST_KEY",
    "SECRET_KEY",
    "CallFault",
    "CallPolicy",
    "Channel",
    "RunningServer",
    "ServiceEntry",
    "StreamEnd",
    "is_serving",
    "lacking",
    "metadata",
    "open_channel",
    "start_server",
    "why_not",
]

_SERVER_OPTIONS: Final[list[tuple[str, Any]]] = [
    *OPTIONS,
    # Without this a second process binds the same port and calls hang.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", SPREAD_KEEPALIVE_SECONDS * 500),
    ("grpc.keepalive_permit_without_calls", 1),
]

Channel = grpc.aio.Channel

LAME_SECONDS: Final = 0.3
"""How long a server that drains still takes calls of those who have not heard of it."""

CallFault: Final = grpc.aio.AioRpcError
"""What every call may raise; `services.kit.wire.errors.from_rpc_error` says what it means."""

SECRET_KEY: Final = "x-nightshift-secret"  # noqa: S105 - the name of a key, not a secret
PROJECT_KEY: Final = "x-nightshift-project"
REQUEST_KEY: Final = "x-request-id"
API_KEY_ID_KEY: Final = "x-nightshift-key"
IDEMPOTENCY_KEY: Final = "idempotency-key"
OPERATOR_KEY: Final = "x-nightshift-operator"

_NEED: Final = "nightshift.needs."
"""Before what a service needs, as a name of its health service: it serves while that is there."""


@dataclass(frozen=True, slots=True)
class ServiceEntry:
    """A servicer and how it is added to a server."""

    full_name: str
    servicer: Any
    add: Callable[[Any, Any], None]


def metadata(
    secret: str,
    *,
    project_id: str | None = None,
    request_id: str | None = None,
    key_id: str | None = None,
    idempotency_key: str | None = None,
    operator: str | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call from one service to another.

    Args:
        secret: the fleet's shared secret.
        project_id: whose objects the call is about; only the gateway sets it.
        request_id: the public `req_…` id, for logs.
        key_id: the API key that was shown, for usage; only the gateway sets it.
        idempotency_key: under which a file or batch is created, as the client sent it.
        operator: who runs an operator's command, for logs; only those set it.
    """
    pairs = [(SECRET_KEY, secret)]
    optional = (
        (PROJECT_KEY, project_id),
        (REQUEST_KEY, request_id),
        (API_KEY_ID_KEY, key_id),
        (IDEMPOTENCY_KEY, idempotency_key),
        (OPERATOR_KEY, operator),
    )
    pairs += [(name, value) for name, value in optional if value is not None]
    traceparent = telemetry.current_traceparent()
    if traceparent:
        pairs.append(("traceparent", traceparent))
    return tuple(pairs)


class _Health(health.aio.HealthServicer):
    """The health service, whose watches a server that drains does not wait for."""

    def __init__(self) -> None:
        """Serve from the start."""
        super().__init__()
        self.needs: Mapping[str, bool] = {}
        self.watchers = 0
        self._ended = asyncio.Event()

    async def Check(  # noqa: N802 - its name in the protocol
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Tell of the service, of one of its services, or of something that it needs."""
        is_there = self.needs.get(request.service.removeprefix(_NEED))
        if is_there is None or not request.service.startswith(_NEED):
            answer: health_pb2.HealthCheckResponse = await super().Check(request, context)
            return answer
        return health_pb2.HealthCheckResponse(status=_status(is_there))

    async def Watch(  # noqa: N802 - its name in the protocol
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> None:
        """Tell of every change until the server drains."""
        tasks = [
            asyncio.ensure_future(super().Watch(request, context)),
            asyncio.ensure_future(self._ended.wait()),
        ]
        self.watchers += 1
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.watchers -= 1
            for task in tasks:
                task.cancel()

    def end_watches(self) -> None:
        """Let all of them end."""
        self._ended.set()


def _status(can: bool) -> Any:
    statuses = health_pb2.HealthCheckResponse
    return statuses.SERVING if can else statuses.NOT_SERVING


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that listens; keep it referenced, or it stops serving."""

    server: grpc.aio.Server
    health: _Health
    port: int
    names: tuple[str, ...] = ("",)

    async def set_ready(self, ready: bool, *, still: Collection[str] = ()) -> None:
        """Say whether work can be taken right now; a server is ready from its start.

        Args:
            ready: whether it can.
            still: full names of services that can be called even though not.
        """
        for name in self.names:
            await self.health.set(name, _status(ready or name in still))

    def set_needs(self, there: Mapping[str, bool]) -> None:
        """Say of each thing that the service needs whether it is there; `lacking` asks for it."""
        self.health.needs = there

    async def drain(
        self, grace_seconds: float, end_streams: Callable[[], None] = lambda: None
    ) -> None:
        """Say that no new work is taken, then give what runs `grace_seconds`.

        Args:
            grace_seconds: what is left after that is cut off.
            end_streams: asks streams to end that would go on for as long as both sides are there.
        """
        await self.health.enter_graceful_shutdown()
        if self.health.watchers:
            # Who watches sends its calls elsewhere as soon as it hears; until then they are taken.
            await asyncio.sleep(LAME_SECONDS)
        end_streams()
        self.health.end_watches()
        await self.server.stop(grace_seconds)


async def is_serving(
    channel: grpc.aio.Channel, service: str = "", *, timeout_seconds: float = 1.0
) -> bool:
    """Ask the other side's health service whether it takes work; no answer means no.

    Args:
        channel: to the other side.
        service: full name of one service there; empty for all of them.
        timeout_seconds: wait for an answer.
    """
    status = await _health(channel, service, timeout_seconds)
    return status == health_pb2.HealthCheckResponse.SERVING


async def lacking(
    channel: grpc.aio.Channel, needs: Sequence[str], *, timeout_seconds: float = 1.0
) -> list[str]:
    """Ask the other side which of these it needs and has not; without an answer, none.

    Args:
        channel: to the other side.
        needs: as it named them to `RunningServer.set_needs`.
        timeout_seconds: wait for each answer.
    """
    asked = (_health(channel, f"{_NEED}{name}", timeout_seconds) for name in needs)
    found = zip(needs, await asyncio.gather(*asked), strict=True)
    return [name for name, said in found if said == health_pb2.HealthCheckResponse.NOT_SERVING]


async def _health(channel: grpc.aio.Channel, service: str, timeout_seconds: float) -> int | None:
    """Return what a health service says of a name; None where it does not answer, or of it."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        answer = await stub.Check(request, timeout=timeout_seconds)
    except grpc.aio.AioRpcError:
        return None
    return int(answer.status)


class StreamEnd:
    """The true end of a call that streams requests; make it as soon as the call is opened.

    When the other side ends such a call early, grpcio's failing write sets the status to INTERNAL,
    before or after the real one arrives, and the later of the two stands (measured: each of 300
    calls that the server refused while frames were on their way).
    """

    _MASK = "Internal error from Core"

    def __init__(self, call: Any) -> None:
        """Watch `call`, an open stream-unary or stream-stream call."""
        self._call = call
        self._fault: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        details = _now(call.details())
        if details == self._MASK or self._fault is not None:
            return
        trailing = _now(call.trailing_metadata()) or grpc.aio.Metadata()
        self._fault = grpc.aio.AioRpcError(
            _now(call.code()), grpc.aio.Metadata(), trailing, details
        )

    async def fault(self, raised: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Return what the other side said where `raised` hides it, else `raised`."""
        if raised.details() != self._MASK:
            return raised
        # The real status is told to nobody when it overwrites the false one, so it is looked for.
        for _ in range(100):
            self._note(self._call)
            if self._fault is not None:
                return self._fault
            await asyncio.sleep(0.01)
        return raised


def _now(coroutine: Any) -> Any:
    """Return a finished call's answer, which its coroutine gives without waiting."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("the call has not ended")


async def start_server(
    listen: str,
    services: Sequence[ServiceEntry],
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    *,
    setting: str = "the service's setting",
    most_calls: int | None = None,
    options: Sequence[tuple[str, Any]] = (),
) -> RunningServer:
    """Start a server with health and reflection beside `services`.

    Args:
        listen: `host:port`; port 0 picks a free one.
        services: what it serves.
        interceptors: outermost first.
        setting: what names another address, for whoever reads the error.
        most_calls: calls at once, above which others are refused with RESOURCE_EXHAUSTED.
        options: of gRPC's core, beside those that all servers have.

    Raises:
        SettingsError: the port is taken, or the address is not this machine's.
    """
    server = grpc.aio.server(
        options=[*_SERVER_OPTIONS, *options],
        interceptors=list(interceptors),
        maximum_concurrent_rpcs=most_calls,
    )
    names = [reflection.SERVICE_NAME, health.SERVICE_NAME]
    for entry in services:
        entry.add(entry.servicer, server)
        names.append(entry.full_name)
    health_servicer = _Health()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(names, server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError:
        raise SettingsError(
            f"cannot listen on {listen}: {_tried(listen)}; {setting} names another address"
        ) from None
    await server.start()
    running = RunningServer(server, health_servicer, port, ("", *names[2:]))
    await running.set_ready(True)
    return running


def why_not(error: OSError) -> str:
    """Return why an address cannot be listened on."""
    # Of a name that is none the number is another table's.
    if error.errno is None or isinstance(error, socket.gaierror):
        return str(error.strerror or error)
    return os.strerror(error.errno)


def _tried(listen: str) -> str:
    """Find out why an address cannot be listened on, which gRPC tells nobody."""
    try:
        host, port = split_address(listen)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family):
            return "gRPC refused it"
    except OSError as error:
        return why_not(error)
    except ValueError as error:
        return str(error)
