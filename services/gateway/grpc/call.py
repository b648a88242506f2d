"""What every public gRPC call passes through: its id, then who calls."""

from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

import grpc
import structlog
from google.protobuf.message import Message
from opentelemetry import context as trace_context
from opentelemetry import trace

from services.gateway import checks, key_metrics
from services.gateway.auth import Caller
from services.gateway.callers import network_of, peer_address
from services.gateway.context import Context
from services.gateway.rest.pace import Pace
from services.gateway.shares import Shares
from services.kit.calls import interceptors, rpc
from services.kit.calls.interceptors import Call, metadata_value
from services.kit.process import telemetry
from services.kit.process.log import get_logger
from services.kit.wire.errors import InvalidRequestError, RateLimitedError

_log = get_logger(__name__)

MAX_CALLS: Final = 4_096
"""gRPC calls at once, watches of health included."""
OTHER_CALLS: Final = 256
"""On top of those, so that whoever is refused hears why."""
MAX_CONNECTIONS: Final = 512
"""gRPC connections at once."""
IDLE_CONNECTION_MS: Final = 300_000
"""A connection without a call for so long is closed."""

_request_id: ContextVar[str] = ContextVar("nightshift_grpc_request_id")
_caller: ContextVar[Caller] = ContextVar("nightshift_grpc_caller")

Frame = TypeVar("Frame", bound=Message)


class RequestInterceptor(interceptors.AroundInterceptor):
    """Gives each call its request id, in trailing metadata and logs, and its root span."""

    _SPAN: Final[ContextVar[tuple[trace.Span, object]]] = ContextVar("nightshift_grpc_span")

    def __init__(self, context: Context) -> None:
        """Take ids from `context`."""
        super().__init__()
        self._context = context

    async def enter(self, method: str, context: Call) -> None:
        """Name the call."""
        request_id = self._context.new_request_id()
        _request_id.set(request_id)
        client = peer_address(context.peer())
        structlog.contextvars.bind_contextvars(request_id=request_id, client=client)
        context.set_trailing_metadata(((rpc.REQUEST_KEY, request_id),))
        if telemetry.enabled():
            parent = telemetry.context_of({"traceparent": metadata_value(context, "traceparent")})
            span = telemetry.tracer.start_span(
                method.removeprefix("/"), context=parent, kind=trace.SpanKind.SERVER
            )
            self._SPAN.set((span, trace_context.attach(trace.set_span_in_context(span))))

    async def leave(
        self, method: str, context: Call, error: BaseException | None, seconds: float
    ) -> None:
        """End the span, and log one line."""
        caller = _caller.get(None)
        if caller is not None and caller.key_id is not None:
            key_metrics.ended(caller.key_id)
        if not method.startswith(interceptors.OPEN_METHODS):
            code = interceptors.code_name(context, error)
            _log.info("request", method=method, code=code, ms=round(seconds * 1000, 1))
        entry = self._SPAN.get(None)
        if entry is not None:
            entry[0].end()


class ShareInterceptor(interceptors.AroundInterceptor):
    """Bounds the calls of one address, those that need no key included."""

    _HOLDER: Final[ContextVar[str]] = ContextVar("nightshift_grpc_share")

    def __init__(self) -> None:
        """Have no call running."""
        super().__init__()
        self._calls = Shares(MAX_CALLS)

    async def enter(self, method: str, context: Call) -> None:
        """Refuse a call of an address that has its share."""
        holder = network_of(peer_address(context.peer()))
        if not self._calls.may_take(holder):
            raise RateLimitedError(
                "There are too many calls from this address. Wait until one has ended.",
                retry_after_seconds=1.0,
            )
        self._calls.take(holder)
        self._HOLDER.set(holder)

    async def leave(
        self, method: str, context: Call, error: BaseException | None, seconds: float
    ) -> None:
        """Give the place back."""
        holder = self._HOLDER.get(None)
        if holder is not None:
            self._calls.give_back(holder)


class AuthInterceptor(interceptors.AroundInterceptor):
    """Settles who calls before a servicer sees anything; innermost, so that a refusal is mapped.

    Health and reflection stay open, since probes carry no key and they tell nothing.
    """

    def __init__(self, context: Context) -> None:
        """Ask `context` for callers."""
        super().__init__()
        self._context = context

    async def enter(self, method: str, context: Call) -> None:
        """Refuse a call without a key where one is needed."""
        if method.startswith(interceptors.OPEN_METHODS):
            return
        authorization = metadata_value(context, "authorization")
        caller, allowance = await self._context.admit(
            authorization, _request_id.get(), peer_address(context.peer())
        )
        _caller.set(caller)
        if allowance is not None:
            outer = tuple(context.trailing_metadata() or ())
            context.set_trailing_metadata((*outer, *allowance.headers()))
            allowance.check()


class FirstMessageInterceptor(grpc.aio.ServerInterceptor):
    """Waits for the one message of a unary call inside of the other interceptors.

    gRPC would wait for it before any of them, so that calls whose message never comes would be
    counted for no address and never end.
    """

    def __init__(self) -> None:
        """Know no method yet."""
        self._known: dict[str, tuple[interceptors.Handler, interceptors.Handler]] = {}

    async def intercept_service(
        self,
        continuation: interceptors.Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> interceptors.Handler:
        """Take a unary request as a stream of one; on the wire they are the same."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        method = handler_call_details.method
        known = self._known.get(method)
        if known is None or known[0] is not handler:
            known = self._known[method] = (handler, self._of_stream(handler))
        return known[1]

    def _of_stream(self, handler: Any) -> interceptors.Handler:
        async def one(requests: AsyncIterator[Any], context: Call) -> Any:
            request: Any = await Pace().wait(anext(requests, None))
            if request is None:
                raise InvalidRequestError("The call has no message.")
            answer = (handler.unary_unary or handler.unary_stream)(request, context)
            return await answer

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(one, handler.request_deserializer, handler.response_serializer)


class Servicer:
    """What each public servicer is made of."""

    def __init__(self, context: Context) -> None:
        """Forward to `context`'s store."""
        self._context = context
        self._store = context.store

    def _caller(self) -> Caller:
        """Return on whose behalf the current call runs."""
        return _caller.get()

    def _keyed_caller(self, context: Call) -> Caller:
        """Return the same with the idempotency key of a call that creates something.

        Raises:
            InvalidRequestError: the key is none.
        """
        key = checks.idempotency_key_of(metadata_value(context, rpc.IDEMPOTENCY_KEY))
        return replace(_caller.get(), idempotency_key=key)


class Frames(Generic[Frame]):
    """What a client streams, frame by frame."""

    def __init__(self, requests: AsyncIterator[Frame]) -> None:
        """Read from `requests`."""
        self._requests = requests
        self._pace = Pace()

    async def next(self) -> Frame | None:
        """Return the next frame; None at the end.

        Raises:
            InvalidRequestError: nothing came for too long, or too little.
        """
        frame = await self._pace.wait(anext(self._requests, None))
        if frame is not None:
            self._pace.came(frame.ByteSize())
        return frame
