"""gRPC transport: the only place that knows channels, servers and the policy of each call."""

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.kit import telemetry
from services.kit.frames import FRAME_BYTES

KEEPALIVE_SECONDS: Final = 10
"""Both sides of a connection: a client that pings faster than the server allows is cut off."""

_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 4 * FRAME_BYTES),
    ("grpc.max_send_message_length", 4 * FRAME_BYTES),
    # Left to itself, the receiver widens a stream's window far beyond what is being read: four
    # uploads to a busy store held 330 MiB (measured), with this 60 MiB and at the same speed.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", FRAME_BYTES),
]
_SERVER_OPTIONS: Final[list[tuple[str, Any]]] = [
    *_OPTIONS,
    # Without this a second process binds the same port and calls hang.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 500),
    ("grpc.keepalive_permit_without_calls", 1),
]
_CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    *_OPTIONS,
    # The default backoff grows to minutes; recovery is budgeted in seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.keepalive_permit_without_calls", 1),
]


Channel = grpc.aio.Channel

CallFault: Final = grpc.aio.AioRpcError
"""What every call may raise; `services.kit.errors.from_rpc_error` says what it means."""

SECRET_KEY: Final = "x-nightshift-secret"  # noqa: S105 - the name of a key, not a secret
PROJECT_KEY: Final = "x-nightshift-project"
REQUEST_KEY: Final = "x-request-id"
API_KEY_ID_KEY: Final = "x-nightshift-key"
IDEMPOTENCY_KEY: Final = "idempotency-key"


@dataclass(frozen=True, slots=True)
class ServiceEntry:
    """A servicer and how it is added to a server."""

    full_name: str
    servicer: Any
    add: Callable[[Any, Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPolicy:
    """How one RPC is called.

    Attributes:
        timeout_seconds: deadline of a unary call; None for streams, which have an idle limit.
        repeatable: whether UNAVAILABLE may be retried without doing something twice.
    """

    timeout_seconds: float | None
    repeatable: bool


_READ: Final = CallPolicy(timeout_seconds=10, repeatable=True)
_WRITE: Final = CallPolicy(timeout_seconds=10, repeatable=False)
_STREAM: Final = CallPolicy(timeout_seconds=None, repeatable=False)

POLICIES: Final[dict[tuple[str, str], CallPolicy]] = {
    ("Files", "UploadFile"): _STREAM,
    ("Files", "GetFile"): _READ,
    ("Files", "ListFiles"): _READ,
    ("Files", "DeleteFile"): _WRITE,
    ("Files", "ReadFile"): _STREAM,
    ("Uploads", "CreateUpload"): _WRITE,
    ("Uploads", "AddUploadPart"): _STREAM,
    # Reads all of the content where an MD5 is to be checked; answers the same when repeated.
    ("Uploads", "CompleteUpload"): CallPolicy(timeout_seconds=600, repeatable=True),
    ("Uploads", "CancelUpload"): _WRITE,
    ("Batches", "CreateBatch"): _WRITE,
    ("Batches", "GetBatch"): _READ,
    ("Batches", "ListBatches"): _READ,
    ("Batches", "CancelBatch"): CallPolicy(timeout_seconds=10, repeatable=True),
    ("Batches", "GetUsage"): _READ,
    ("Events", "WatchBatch"): _STREAM,
    # It waits up to 20 s for something to happen.
    ("Events", "ReadBatchEvents"): CallPolicy(timeout_seconds=30, repeatable=True),
    ("Models", "ListModels"): _READ,
    ("Models", "GetModel"): _READ,
    ("Admin", "PutModels"): CallPolicy(timeout_seconds=10, repeatable=True),
    ("Admin", "DeleteModel"): _WRITE,
    ("Admin", "CreateKey"): _WRITE,
    ("Admin", "ListKeys"): _READ,
    ("Admin", "RevokeKey"): CallPolicy(timeout_seconds=10, repeatable=True),
    ("Admin", "LookUpKey"): CallPolicy(timeout_seconds=5, repeatable=True),
    ("Admin", "ListUsage"): _READ,
    ("Webhooks", "CreateWebhookEndpoint"): _WRITE,
    ("Webhooks", "GetWebhookEndpoint"): _READ,
    ("Webhooks", "ListWebhookEndpoints"): _READ,
    ("Webhooks", "UpdateWebhookEndpoint"): CallPolicy(timeout_seconds=10, repeatable=True),
    ("Webhooks", "DeleteWebhookEndpoint"): _WRITE,
    ("Webhooks", "RotateWebhookSecret"): _WRITE,
    # Longer than its receiver is given.
    ("Webhooks", "TestWebhookEndpoint"): CallPolicy(timeout_seconds=30, repeatable=False),
    ("Webhooks", "ListWebhookEventTypes"): _READ,
    ("Webhooks", "ListWebhookDeliveries"): _READ,
    ("Webhooks", "RedeliverWebhook"): CallPolicy(timeout_seconds=10, repeatable=True),
    ("Work", "Lead"): CallPolicy(timeout_seconds=2, repeatable=True),
    ("Work", "Resign"): CallPolicy(timeout_seconds=1, repeatable=True),
    ("Work", "GetWindow"): _READ,
    # A lost answer leaves chunks that reclaiming finds again: repeating would cut further ones.
    ("Work", "CutChunks"): _WRITE,
    ("Work", "ReportPools"): CallPolicy(timeout_seconds=5, repeatable=True),
    ("Work", "ReclaimChunks"): _WRITE,
    ("Work", "RegisterExecutor"): CallPolicy(timeout_seconds=10, repeatable=True),
    ("Work", "OpenAttempt"): CallPolicy(timeout_seconds=5, repeatable=True),
    ("Work", "ReadLines"): _STREAM,
    ("Work", "AppendResults"): _STREAM,
    ("Work", "Beat"): CallPolicy(timeout_seconds=2, repeatable=True),
    ("Work", "HandBack"): CallPolicy(timeout_seconds=5, repeatable=True),
    ("Work", "ReportDeath"): CallPolicy(timeout_seconds=10, repeatable=True),
}
"""One row for each RPC; a test holds it against the protos."""


def _service_config() -> str:
    methods: list[dict[str, Any]] = []
    for (service, method), policy in POLICIES.items():
        config: dict[str, Any] = {
            "name": [{"service": f"nightshift.v1.{service}", "method": method}],
        }
        if policy.timeout_seconds is not None:
            # A restarting service is waited for, up to the deadline; a call that never left is
            # safe to send later whatever it does.
            config["waitForReady"] = True
        if policy.repeatable:
            config["retryPolicy"] = {
                "maxAttempts": 5,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["UNAVAILABLE"],
            }
        methods.append(config)
    return json.dumps({"methodConfig": methods})


_SERVICE_CONFIG: Final = _service_config()


def metadata(
    secret: str,
    *,
    project_id: str | None = None,
    request_id: str | None = None,
    key_id: str | None = None,
    idempotency_key: str | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call from one service to another.

    Args:
        secret: the fleet's shared secret.
        project_id: whose objects the call is about; only the gateway sets it.
        request_id: the public `req_…` id, for logs.
        key_id: the API key that was shown, for usage; only the gateway sets it.
        idempotency_key: under which a file or batch is created, as the client sent it.
    """
    pairs = [(SECRET_KEY, secret)]
    optional = (
        (PROJECT_KEY, project_id),
        (REQUEST_KEY, request_id),
        (API_KEY_ID_KEY, key_id),
        (IDEMPOTENCY_KEY, idempotency_key),
    )
    pairs += [(name, value) for name, value in optional if value is not None]
    traceparent = telemetry.current_traceparent()
    if traceparent:
        pairs.append(("traceparent", traceparent))
    return tuple(pairs)


class _DeadlineChannel(grpc.aio.Channel):
    """A channel on which every unary call has the deadline of its policy.

    Not by the service config's `timeout`: grpc reckons that one from the processor's cycle counter,
    and the error of its calibration grows with the machine's uptime. Measured half an hour after
    boot: deadlines 1.1 to 1.4 s early, so that a call with one second failed at once, unsent.
    """

    def __init__(self, inner: grpc.aio.Channel) -> None:
        """Call over `inner`."""
        self._inner = inner

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the call of a method, with its deadline as the default."""
        call: Any = self._inner.unary_unary(method, *args, **kwargs)
        service, _, name = method.lstrip("/").partition("/")
        policy = POLICIES.get((service.rpartition(".")[2], name))
        if policy is None or policy.timeout_seconds is None:
            return call
        return functools.partial(call, timeout=policy.timeout_seconds)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Return the call of a method that streams answers."""
        return self._inner.unary_stream(*args, **kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Return the call of a method that takes a stream."""
        return self._inner.stream_unary(*args, **kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Return the call of a method that streams both ways."""
        return self._inner.stream_stream(*args, **kwargs)

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """End what runs after `grace` seconds, and disconnect."""
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the connection."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the state differs."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait for the connection."""
        await self._inner.channel_ready()


def open_channel(target: str) -> grpc.aio.Channel:
    """Open a channel to `host:port`; it belongs to the running loop and is closed by the caller."""
    return _DeadlineChannel(
        grpc.aio.insecure_channel(
            target, options=[*_CHANNEL_OPTIONS, ("grpc.service_config", _SERVICE_CONFIG)]
        )
    )


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that listens; keep it referenced, or it stops serving."""

    server: grpc.aio.Server
    health: health.aio.HealthServicer
    port: int
    names: tuple[str, ...] = ("",)

    async def set_ready(self, ready: bool) -> None:
        """Say whether work can be taken right now; a server is ready from its start."""
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if ready else statuses.NOT_SERVING
        for name in self.names:
            await self.health.set(name, status)

    async def drain(self, grace_seconds: float) -> None:
        """Say that no new work is taken, then give what runs `grace_seconds`."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_seconds)


async def is_serving(channel: grpc.aio.Channel, *, timeout_seconds: float = 1.0) -> bool:
    """Ask the other side's health service whether it takes work; no answer means no."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


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
) -> RunningServer:
    """Start a server with health and reflection beside `services`.

    Args:
        listen: `host:port`; port 0 picks a free one.
        services: what it serves.
        interceptors: outermost first.

    Raises:
        RuntimeError: the port is taken.
    """
    server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=list(interceptors))
    names = [reflection.SERVICE_NAME, health.SERVICE_NAME]
    for entry in services:
        entry.add(entry.servicer, server)
        names.append(entry.full_name)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(names, server)
    port = server.add_insecure_port(listen)
    await server.start()
    running = RunningServer(server, health_servicer, port, ("", *names[2:]))
    await running.set_ready(True)
    return running
