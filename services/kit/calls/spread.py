"""A channel to several stores, any of which may answer any call."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self

import grpc

from services.kit.calls.peers import Peer, Peers, State
from services.kit.calls.policies import policy_of

SUSPECT_SECONDS: Final = 0.3
"""A call that waits this long for its answer has the peer asked whether it is there at all."""
_DELAYS_SECONDS: Final = (0.05, 0.15, 0.45, 1.0, 0.0)
"""One for each try; waited when every peer that is there has failed."""

# What gRPC says of a call that found no connection: nobody has seen it.
_NEVER_LEFT: Final = ("failed to connect to all addresses", "connections to all backends failing")

_Start = Callable[[Peer], Any]


class SpreadChannel(grpc.aio.Channel):
    """Sends each call to a peer that serves.

    A unary call that may be repeated moves on when its peer is lost; any call does that never left.
    A stream stays where it was opened, and breaks with its peer.
    """

    def __init__(self, peers: Peers) -> None:
        """Call these; they are closed with the channel."""
        self._peers = peers

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the call of a method; it is awaited, and that is all that can be done with it."""
        policy = policy_of(method)
        default = None if policy is None else policy.timeout_seconds
        repeatable = policy is None or policy.repeatable

        def call(request: Any, *, timeout: float | None = default, **how: Any) -> Awaitable[Any]:
            until = None if timeout is None else asyncio.get_running_loop().time() + timeout

            def start(peer: Peer) -> Any:
                left = None if until is None else max(0.0, until - _now())
                inner: Any = peer.channel.unary_unary(method, *args, **kwargs)
                return inner(request, timeout=left, **how)

            return self._unary(start, until, repeatable)

        return call

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the call of a method that streams answers."""
        return self._streaming(lambda peer: peer.channel.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the call of a method that takes a stream."""
        return self._streaming(lambda peer: peer.channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the call of a method that streams both ways."""
        return self._streaming(lambda peer: peer.channel.stream_stream(method, *args, **kwargs))

    def _streaming(self, method_of: _Start) -> Any:
        def call(*args: Any, **how: Any) -> Any:
            peer = self._peers.pick_any()
            opened = method_of(peer)(*args, **how)
            peer.calls += 1

            def ended(_: Any) -> None:
                peer.calls -= 1

            opened.add_done_callback(ended)
            return opened

        return call

    async def _unary(self, start: _Start, until: float | None, repeatable: bool) -> Any:
        failed: set[Peer] = set()
        fault = _fault(grpc.StatusCode.UNAVAILABLE, "no store answers")
        for delay in _DELAYS_SECONDS:
            peer = self._peers.pick(but=failed) or await self._peers.wait(until)
            if peer is None:
                break
            try:
                return await self._at(peer, start, repeatable)
            except _Silent:
                failed.add(peer)
                continue
            except grpc.aio.AioRpcError as raised:
                if not self._may_move(peer, raised, repeatable):
                    raise
                fault = raised
            failed.add(peer)
            if self._peers.pick(but=failed) is None:
                # All were tried: what comes now is another round.
                failed.clear()
                await asyncio.sleep(delay)
            if until is not None and _now() >= until:
                break
        raise fault

    def _may_move(self, peer: Peer, fault: grpc.aio.AioRpcError, repeatable: bool) -> bool:
        """Tell whether a call that failed so may be sent to another peer."""
        if fault.code() is not grpc.StatusCode.UNAVAILABLE:
            return False
        if (fault.details() or "").startswith(_NEVER_LEFT):
            self._peers.lost(peer)
            return True
        return repeatable

    async def _at(self, peer: Peer, start: _Start, repeatable: bool) -> Any:
        """Make one call at one peer.

        Raises:
            _Silent: the peer does not answer at all, and another one may.
        """
        call = start(peer)
        # Awaited in a task, since waiting for a call itself would cancel it.
        answer = asyncio.ensure_future(_result(call))
        peer.calls += 1
        try:
            while not answer.done():
                await asyncio.wait((answer,), timeout=SUSPECT_SECONDS)
                if answer.done() or await self._is_there(peer, answer) or not repeatable:
                    continue
                if self._peers.pick(but=(peer,)) is not None and not answer.done():
                    raise _Silent
            if answer.cancelled():
                # By the other side: nobody here did.
                raise _fault(grpc.StatusCode.UNAVAILABLE, "the store has ended the call")
            result = answer.result()
        finally:
            peer.calls -= 1
            if not answer.done():
                answer.cancel()
                call.cancel()
        self._peers.heard(peer)
        return result

    async def _is_there(self, peer: Peer, answer: "asyncio.Future[Any]") -> bool:
        """Ask a peer, for as long as its answer to the call is not there."""
        if peer.state is State.LOST:
            return False
        asking = asyncio.ensure_future(self._peers.answers(peer))
        await asyncio.wait((answer, asking), return_when=asyncio.FIRST_COMPLETED)
        return not asking.done() or asking.result()

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """End what runs after `grace` seconds, and disconnect."""
        await self._peers.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return whether any peer takes calls."""
        if self._peers.pick() is not None:
            return grpc.ChannelConnectivity.READY
        return grpc.ChannelConnectivity.CONNECTING

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the state differs."""
        while self.get_state() is last_observed_state:
            await self._peers.change()

    async def channel_ready(self) -> None:
        """Wait until some peer takes calls."""
        await self._peers.wait(None)


class _Silent(Exception):
    """The peer of a call does not answer at all."""


async def _result(call: Any) -> Any:
    return await call


def _fault(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def _now() -> float:
    return asyncio.get_running_loop().time()
