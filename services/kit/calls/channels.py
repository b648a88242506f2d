"""Channels to other services: options, deadlines, and one address or several."""

import functools
from typing import Any, Final, Self

import grpc

from services.kit.calls.peers import Peers, is_address
from services.kit.calls.policies import policy_of, service_config
from services.kit.calls.spread import SpreadChannel
from services.kit.process.addresses import parse_addresses
from services.kit.wire.frames import FRAME_BYTES

KEEPALIVE_SECONDS: Final = 10
"""Both sides of a connection: a client that pings faster than the server allows is cut off."""

SPREAD_KEEPALIVE_SECONDS: Final = 2
"""The same of a client that has several servers to choose from."""

OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # What ends a connection whose pings are not answered: the above alone does so after a minute
    # (measured with grpcio 1.85: a stopped peer's streams hung for that long).
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 4 * FRAME_BYTES),
    ("grpc.max_send_message_length", 4 * FRAME_BYTES),
    # Left to itself, the receiver widens a stream's window far beyond what is being read: four
    # uploads to a busy store held 330 MiB (measured), with this 60 MiB and at the same speed.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", FRAME_BYTES),
]
CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    *OPTIONS,
    # The default backoff grows to minutes; recovery is budgeted in seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.keepalive_permit_without_calls", 1),
]

_TIMES: Final = ("keepalive_time_ms", "keepalive_timeout_ms", "ping_timeout_ms")

# Where others can answer, a connection on which nothing moves is given up sooner, with the streams
# on it; unary calls have moved on by then.
_SPREAD_OPTIONS: Final[list[tuple[str, Any]]] = [
    *(each for each in CHANNEL_OPTIONS if not each[0].endswith(_TIMES)),
    ("grpc.keepalive_time_ms", 1000 * SPREAD_KEEPALIVE_SECONDS),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
]


class DeadlineChannel(grpc.aio.Channel):
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
        policy = policy_of(method)
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
    """Open a channel to one or more stores; it belongs to the running loop, its caller closes it.

    Args:
        target: `host:port`, several of them separated by commas. A host may be a name, which may
            stand for several addresses; those are looked up again while the channel is open.

    Raises:
        ValueError: it is no such list.
    """
    entries = parse_addresses(target)
    (host, port), *others = entries
    if others or not (is_address(host) or host == "localhost"):
        return SpreadChannel(Peers(entries, _SPREAD_OPTIONS))
    # Not as it was given: what parts a list may stand around one address, too.
    only = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return DeadlineChannel(
        grpc.aio.insecure_channel(
            only, options=[*CHANNEL_OPTIONS, ("grpc.service_config", service_config())]
        )
    )
