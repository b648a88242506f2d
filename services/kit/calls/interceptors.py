"""What every gRPC call passes through, outermost first: telemetry, auth, errors.

Errors are innermost, so that the outer ones see the final status code. Deadlines come from the
call policy of `services.kit.calls.rpc` and reach handlers as cancellation.
"""

import hmac
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import grpc
import prometheus_client
from grpc_status import rpc_status
from opentelemetry import context as trace_context
from opentelemetry import trace

from services.kit.calls import rpc
from services.kit.process import telemetry
from services.kit.process.log import get_logger
from services.kit.wire import ids
from services.kit.wire.errors import InternalError, NightshiftError, to_status

_log = get_logger(__name__)

OPEN_METHODS: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Beginnings of what anyone may call: it tells nothing, and probes carry neither key nor secret."""

_CALLS = prometheus_client.Counter(
    "nightshift_rpc_calls_total", "gRPC calls served, by method and status.", ["method", "code"]
)
_SECONDS = prometheus_client.Histogram(
    "nightshift_rpc_seconds", "Time of a gRPC call in its handler, in seconds.", ["method"]
)

if TYPE_CHECKING:
    Call = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any] | None
else:  # both are generic in their stubs only
    Call = grpc.aio.ServicerContext
    Handler = Any

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Enter = Callable[[str, Call], Awaitable[None]]
Leave = Callable[[str, Call, BaseException | None, float], Awaitable[None]]


class AroundInterceptor(grpc.aio.ServerInterceptor):
    """Runs `enter` before and `leave` after a handler of any of the four shapes."""

    def __init__(self) -> None:
        """Wrap nothing yet."""
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}

    async def enter(self, method: str, context: Call) -> None:
        """Raise to refuse the call."""

    async def leave(
        self,
        method: str,
        context: Call,
        error: BaseException | None,
        seconds: float,
    ) -> None:
        """See how the call ended; what this raises replaces `error`."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap the handler that the inner interceptors produce."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        # A server has one handler for each of its methods, and wrapping it anew costs each call.
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = (handler, self._wrap(method, handler))
        return known[1]

    def _wrap(self, method: str, handler: Any) -> Handler:
        behaviour = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        wrapped = (
            self._around_stream(method, behaviour)
            if handler.response_streaming
            else self._around_unary(method, behaviour)
        )
        maker = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[(handler.request_streaming, handler.response_streaming)]
        return maker(wrapped, handler.request_deserializer, handler.response_serializer)

    def _around_unary(self, method: str, behaviour: Any) -> Any:
        async def call(request: Any, context: Call) -> Any:
            started = time.perf_counter()
            failure: BaseException | None = None
            try:
                await self.enter(method, context)
                return await behaviour(request, context)
            except BaseException as error:
                failure = error
                raise
            finally:
                await self.leave(method, context, failure, time.perf_counter() - started)

        return call

    def _around_stream(self, method: str, behaviour: Any) -> Any:
        async def call(request: Any, context: Call) -> AsyncIterator[Any]:
            started = time.perf_counter()
            failure: BaseException | None = None
            try:
                await self.enter(method, context)
                answers = behaviour(request, context)
                if inspect.isawaitable(answers):
                    await answers
                    return
                async for answer in answers:
                    yield answer
            except BaseException as error:
                failure = error
                raise
            finally:
                await self.leave(method, context, failure, time.perf_counter() - started)

        return call


class TelemetryInterceptor(AroundInterceptor):
    """Counts and times calls; outermost."""

    async def leave(
        self,
        method: str,
        context: Call,
        error: BaseException | None,
        seconds: float,
    ) -> None:
        """Record the call under its final status code."""
        _CALLS.labels(method, code_name(context, error)).inc()
        _SECONDS.labels(method).observe(seconds)


class TraceInterceptor(AroundInterceptor):
    """Spans of calls that belong to a trace already; the fleet's own chatter makes none."""

    _span: ContextVar[trace.Span | None] = ContextVar("nightshift_rpc_span", default=None)

    async def enter(self, method: str, context: Call) -> None:
        """Begin a span below the caller's, where traces are exported."""
        self._span.set(None)
        traceparent = metadata_value(context, "traceparent") if telemetry.enabled() else ""
        if traceparent:
            span = telemetry.tracer.start_span(
                method.removeprefix("/"),
                context=telemetry.context_of({"traceparent": traceparent}),
                kind=trace.SpanKind.SERVER,
            )
            self._span.set(span)
            # Never detached: the call's task, and the context with it, ends with the call.
            trace_context.attach(trace.set_span_in_context(span))

    async def leave(
        self, method: str, context: Call, error: BaseException | None, seconds: float
    ) -> None:
        """End the span."""
        span = self._span.get()
        if span is None:
            return
        if isinstance(error, Exception):
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
        span.end()


class SecretInterceptor(AroundInterceptor):
    """Lets only services in: the fleet's shared secret must come with every call.

    Health and reflection stay open, since probes carry no secret and they tell nothing.
    """

    def __init__(self, secret: str) -> None:
        """Compare with `secret`."""
        super().__init__()
        self._secret = secret.encode()

    async def enter(self, method: str, context: Call) -> None:
        """Refuse a call without the secret."""
        if method.startswith(OPEN_METHODS):
            return
        given = metadata_value(context, rpc.SECRET_KEY).encode()
        if not hmac.compare_digest(given, self._secret):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "this service takes calls of services only"
            )


class ErrorsInterceptor(AroundInterceptor):
    """Turns exceptions into statuses with details; innermost."""

    async def leave(
        self,
        method: str,
        context: Call,
        error: BaseException | None,
        seconds: float,
    ) -> None:
        """Abort with the error's own status; unknown ones become INTERNAL with an error id."""
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError):
            return
        if not isinstance(error, NightshiftError):
            error_id = ids.uuid7_hex()
            _log.error("rpc_failed", method=method, error_id=error_id, exc_info=error)
            error = InternalError(f"Something failed on our side; the log names it {error_id}.")
        status = rpc_status.to_status(to_status(error))
        # `abort_with_status` would drop what an outer interceptor has set, such as a request id.
        outer = tuple(context.trailing_metadata() or ())
        await context.abort(status.code, status.details, (*outer, *status.trailing_metadata))


def code_name(context: Call, error: BaseException | None) -> str:
    """Return the status code that a call ended with, as an outer interceptor sees it."""
    # Unset, grpc gives the number 0 rather than a status.
    code: object = context.code()
    unset = "OK" if error is None else "UNKNOWN"
    return code.name if isinstance(code, grpc.StatusCode) else unset


def metadata_value(context: Call, key: str) -> str:
    """Return a call's metadata value as text; empty when absent."""
    for name, value in context.invocation_metadata() or ():
        if name == key:
            return value if isinstance(value, str) else value.decode()
    return ""


def project_of(context: Call) -> ids.ProjectId:
    """Return the project that the gateway named for this call."""
    project = metadata_value(context, rpc.PROJECT_KEY)
    if not project:
        raise InternalError("The call names no project.")
    return ids.ProjectId(project)
