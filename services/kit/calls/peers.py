"""The addresses behind one channel, and which of them take calls right now.

Each peer says by gRPC's health service whether it takes work, and tells at once when that changes.
One that is frozen tells nothing: it is found by a question that stays unanswered, asked when a
call waits suspiciously long, and every now and then.
"""

import asyncio
import contextlib
import enum
import ipaddress
import os
import socket
import zlib
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.kit.process.log import get_logger

_log = get_logger(__name__)

ANSWER_SECONDS: Final = 0.5
"""A peer that does not say within this time whether it serves is lost."""
PULSE_SECONDS: Final = 2.0
"""How often a peer is asked from which nothing was heard meanwhile."""
RESOLVE_SECONDS: Final = 10.0
"""How often a name is looked up again; each second while nobody serves."""
_LOST_SECONDS: Final = 0.25


class State(enum.Enum):
    """What is known of a peer."""

    UNKNOWN = enum.auto()
    SERVING = enum.auto()
    REFUSING = enum.auto()
    """It answers, and says that it takes no work: it drains, or lacks something itself."""
    LOST = enum.auto()


@dataclass(eq=False)
class Peer:
    """One address.

    Attributes:
        target: what gRPC connects to.
        channel: the connection to it.
        state: as last heard.
        calls: those that run there now.
        heard_at: when it last answered anything, in seconds of the loop's clock.
    """

    target: str
    channel: grpc.aio.Channel
    state: State = State.UNKNOWN
    calls: int = 0
    heard_at: float = 0.0
    check: "asyncio.Task[bool] | None" = None
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)


class Peers:
    """Peers of one channel; made in the loop that they are used in."""

    def __init__(
        self, entries: Sequence[tuple[str, int]], options: Sequence[tuple[str, Any]]
    ) -> None:
        """Begin to find out about these.

        Args:
            entries: hosts, which are addresses or names, and ports.
            options: of the channel to each.
        """
        self._options = list(options)
        self._peers: dict[str, Peer] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._turn = zlib.crc32(f"{socket.gethostname()}-{os.getpid()}".encode())
        # A name stands for itself until it is looked up.
        self._keep(_target(host, port) for host, port in entries)
        if any(not is_address(host) for host, _ in entries):
            self._spawn(self._look_up(entries))

    def pick(self, *, but: Iterable[Peer] = ()) -> Peer | None:
        """Return the best peer for a call: the one that serves with the fewest calls.

        One that refuses comes after those that serve: it says why. None where neither is known.
        """
        left_out = set(but)
        peers = list(self._peers.values())
        # Processes begin at different ones, and stay there while all are equal.
        start = self._turn % len(peers)
        ordered = [each for each in peers[start:] + peers[:start] if each not in left_out]
        for state in (State.SERVING, State.REFUSING):
            fitting = [each for each in ordered if each.state is state]
            if fitting:
                return min(fitting, key=lambda each: each.calls)
        return None

    def pick_any(self) -> Peer:
        """Return the best peer, or one that may be none, for a call that fails in its own time."""
        found = self.pick()
        if found is None:
            self._turn += 1
            peers = list(self._peers.values())
            found = peers[self._turn % len(peers)]
        return found

    async def wait(self, until: float | None, *, but: Iterable[Peer] = ()) -> Peer | None:
        """Return the best peer, waiting for one until then; None where there was none."""
        while True:
            changed = self._changed
            found = self.pick(but=but)
            if found is not None:
                return found
            try:
                async with asyncio.timeout_at(until):
                    await changed.wait()
            except TimeoutError:
                return None

    async def change(self) -> None:
        """Wait until something else is known of a peer."""
        await self._changed.wait()

    async def answers(self, peer: Peer) -> bool:
        """Ask a peer whether it is there; from then on it is lost, or it is not."""
        if peer.check is None:
            peer.check = self._spawn(self._check(peer))
            peer.check.add_done_callback(lambda _: setattr(peer, "check", None))
        return await asyncio.shield(peer.check)

    def heard(self, peer: Peer) -> None:
        """Note that a call was answered."""
        peer.heard_at = asyncio.get_running_loop().time()

    def lost(self, peer: Peer) -> None:
        """Note that a peer cannot be reached."""
        self._set(peer, State.LOST)

    async def close(self, grace: float | None) -> None:
        """End all."""
        tasks = [*self._tasks, *(task for peer in self._peers.values() for task in peer.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(peer.channel.close(grace) for peer in self._peers.values()))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _set(self, peer: Peer, state: State) -> None:
        if peer.state is state:
            return
        if state in (State.LOST, State.REFUSING) or peer.state is not State.UNKNOWN:
            _log.info("peer_changed", peer=peer.target, state=state.name.lower())
        peer.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _keep(self, targets: Iterable[str]) -> None:
        """Have exactly these peers."""
        wanted = list(dict.fromkeys(targets))
        for target in wanted:
            if target not in self._peers:
                channel = grpc.aio.insecure_channel(target, options=self._options)
                peer = self._peers[target] = Peer(target, channel)
                loop = asyncio.get_running_loop()
                peer.tasks = [
                    loop.create_task(self._follow(peer)),
                    loop.create_task(self._pulse(peer)),
                ]
        for target in self._peers.keys() - set(wanted):
            self._spawn(self._retire(self._peers.pop(target)))

    async def _retire(self, peer: Peer) -> None:
        """Let the calls of a peer end that its name no longer stands for."""
        for task in peer.tasks:
            task.cancel()
        try:
            while peer.calls:  # noqa: ASYNC110 - nobody waits for it
                await asyncio.sleep(1.0)
        finally:
            await peer.channel.close()

    async def _look_up(self, entries: Sequence[tuple[str, int]]) -> None:
        """Keep the peers that names stand for."""
        loop = asyncio.get_running_loop()
        while True:
            targets: list[str] = []
            for host, port in entries:
                found: list[Any] = []
                if not is_address(host):
                    with contextlib.suppress(OSError):
                        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                # What cannot be looked up now stays as it was.
                addresses = sorted({str(entry[4][0]) for entry in found})
                targets += [_target(each, port) for each in addresses] or [_target(host, port)]
            self._keep(targets)
            await asyncio.sleep(RESOLVE_SECONDS if self.pick() is not None else 1.0)

    async def _follow(self, peer: Peer) -> None:
        """Hear from a peer when it begins and ceases to serve."""
        stub: Any = health_pb2_grpc.HealthStub(peer.channel)
        while True:
            call = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            try:
                async for answer in call:
                    self.heard(peer)
                    self._set(peer, _state_of(answer))
            except grpc.aio.AioRpcError:
                pass
            except asyncio.CancelledError:
                # grpcio raises this too when the other side cancelled.
                if _is_cancelled():
                    raise
            finally:
                call.cancel()
            self._set(peer, State.LOST)
            await asyncio.sleep(_LOST_SECONDS)

    async def _pulse(self, peer: Peer) -> None:
        """Ask a peer that says nothing."""
        loop = asyncio.get_running_loop()
        while True:
            pause = PULSE_SECONDS if peer.state is State.SERVING else _LOST_SECONDS
            await asyncio.sleep(pause)
            if peer.state is not State.SERVING or loop.time() - peer.heard_at >= PULSE_SECONDS:
                await self.answers(peer)

    async def _check(self, peer: Peer) -> bool:
        stub: Any = health_pb2_grpc.HealthStub(peer.channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            if _is_cancelled():
                raise
            self._set(peer, State.LOST)
            return False
        self.heard(peer)
        self._set(peer, _state_of(answer))
        return True


def _state_of(answer: health_pb2.HealthCheckResponse) -> State:
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return State.SERVING if serving else State.REFUSING


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_address(host: str) -> bool:
    """Tell an IP address from a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _target(host: str, port: int) -> str:
    """Return gRPC's name for an address, or for a name that it looks up itself."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return f"dns:///{host}:{port}"
    return f"ipv4:{host}:{port}" if version == 4 else f"ipv6:[{host}]:{port}"
