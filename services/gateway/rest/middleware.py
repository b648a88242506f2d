"""What every HTTP request passes through, outermost first: identity, then errors."""

import time
from collections.abc import Iterable, Mapping
from typing import Final

import prometheus_client
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import key_metrics
from services.gateway.auth import Caller
from services.gateway.callers import caller_address
from services.gateway.rest.envelope import error_response
from services.kit.process.log import get_logger
from services.kit.wire.errors import (
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    NightshiftError,
    NotFoundError,
    TooLargeError,
)
from services.kit.wire.ids import IdGenerator, uuid7_hex

_log = get_logger(__name__)

_REQUESTS = prometheus_client.Counter(
    "nightshift_http_requests_total",
    "HTTP requests answered, by method, route and status.",
    ["method", "route", "status"],
)
_SECONDS = prometheus_client.Histogram(
    "nightshift_http_seconds",
    "Time from an HTTP request's head to the end of its answer, in seconds.",
    ["method", "route"],
)

API_VERSION: Final = b"2020-10-01"
"""What OpenAI's own answers carry as `openai-version`."""

_METHODS: Final = frozenset(
    {"GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS", "TRACE", "CONNECT"}
)
_QUIET: Final = frozenset({"/healthz", "/readyz", "/metrics"})
_REQUEST_ID: Final = "nightshift.request_id"
_HEADERS: Final = "nightshift.headers"
_CALLER: Final = "nightshift.caller"


def request_id_of(scope: Scope) -> str:
    """Return the id that `RequestMiddleware` gave the request."""
    request_id: str = scope[_REQUEST_ID]
    return request_id


def add_headers(scope: Scope, headers: Iterable[tuple[str, str]]) -> None:
    """Have the answer to a request carry these too, whatever it will be."""
    scope[_HEADERS] = [(name.encode(), value.encode()) for name, value in headers]


def note_caller(scope: Scope, caller: Caller) -> None:
    """Have the end of the request counted as the caller's."""
    scope[_CALLER] = caller


class RequestMiddleware:
    """Gives each request its id and its headers, counts it, and logs one line when it ends."""

    def __init__(self, app: ASGIApp, *, new_request_id: IdGenerator) -> None:
        """Wrap `app`; request ids come from `new_request_id`."""
        self._app = app
        self._new_request_id = new_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = scope[_REQUEST_ID] = self._new_request_id()
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                milliseconds = int((time.perf_counter() - started) * 1000)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    (b"openai-version", API_VERSION),
                    # A browser shows what it is sent as what it is called, and guesses nothing.
                    (b"x-content-type-options", b"nosniff"),
                    (b"openai-processing-ms", str(milliseconds).encode()),
                    *scope.get(_HEADERS, ()),
                ]
            await send(message)

        client = caller_address(scope)
        with structlog.contextvars.bound_contextvars(request_id=request_id, client=client):
            try:
                await self._app(scope, receive, send_with_headers)
            finally:
                self._record(scope, status, time.perf_counter() - started)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        caller: Caller | None = scope.get(_CALLER)
        if caller is not None and caller.key_id is not None:
            key_metrics.ended(caller.key_id)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route: str = getattr(scope.get("route"), "path", "unknown")
        _REQUESTS.labels(method, route, str(status)).inc()
        _SECONDS.labels(method, route).observe(seconds)
        if route not in _QUIET:
            _log.info(
                "request", method=method, route=route, status=status, ms=round(seconds * 1000, 1)
            )


class ErrorMiddleware:
    """Turns whatever goes wrong into OpenAI's envelope."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
            return
        except ClientDisconnect:
            _log.info("client_disconnected")
            return
        except NightshiftError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - the last resort, logged there
            error = _unexpected(raised)
        if started:
            # Too late for an envelope. Returning with the answer unfinished makes the server cut
            # the connection, so that the client sees a broken transfer rather than a short file.
            _log.warning("answer_cut_short", error=error.message)
            return
        await error_response(error)(scope, receive, send)


async def framework_error(request: Request, raised: Exception) -> Response:
    """Answer what Starlette itself refuses: an unknown route, or a wrong method."""
    assert isinstance(raised, HTTPException)
    headers = dict(raised.headers or {})
    if "Allow" in headers:
        # Of a set, so that each process would have an order of its own.
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
    return error_response(_of_framework(request.scope, raised, headers), headers=headers)


def _of_framework(
    scope: Scope, raised: HTTPException, headers: Mapping[str, str]
) -> NightshiftError:
    method = scope["method"] if scope["method"] in _METHODS else "?"
    path = scope["path"][:500]
    match raised.status_code:
        case 404:
            return NotFoundError(f"Invalid URL ({method} {path})")
        case 405:
            allowed = headers.get("Allow", "")
            return MethodNotAllowedError(
                f"Not allowed to {method} on {path}. (HINT: it takes {allowed}.)",
                code="method_not_supported",
            )
        case 413:
            return TooLargeError(raised.detail)
        case status if status < 500:
            return InvalidRequestError(raised.detail)
        case _:
            return _unexpected(raised)


def _unexpected(raised: Exception) -> InternalError:
    error_id = uuid7_hex()
    _log.error("request_failed", error_id=error_id, exc_info=raised)
    return InternalError(f"Something failed on our side; the log names it {error_id}.")
