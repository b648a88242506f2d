"""How a route is written: a path, a handler for each method, and who is calling."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway import checks
from services.gateway.auth import Caller
from services.gateway.callers import caller_address
from services.gateway.context import Context
from services.gateway.rest.middleware import add_headers, note_caller, request_id_of
from services.gateway.rest.pace import Pace
from services.kit.wire.errors import InvalidRequestError, TooLargeError, UnsupportedMediaError

MAX_JSON_BYTES: Final = 1024 * 1024
"""Largest JSON body; a batch's own data travels as a file."""

JSON_SECONDS: Final = 120.0
"""By when a JSON body is there, so that a client that drips does not hold its connection."""

Handler = Callable[[Request, Caller], Awaitable[Response]]
Page = Callable[[Request], Awaitable[Response]]


def resource(context: Context, path: str, handlers: Mapping[str, Handler]) -> list[Route]:
    """Return the routes of one path, with and without a slash at its end.

    A redirect is never sent: it would break an upload.

    Args:
        context: knows who is calling.
        path: as Starlette spells it.
        handlers: by method; GET serves HEAD too.
    """

    async def endpoint(request: Request) -> Response:
        caller, allowance = await context.admit(
            request.headers.get("authorization", ""),
            request_id_of(request.scope),
            caller_address(request.scope),
        )
        note_caller(request.scope, caller)
        if allowance is not None:
            add_headers(request.scope, allowance.headers())
            allowance.check()
        if caller.key_id is None:
            context.sites.check(request)
        method = "GET" if request.method == "HEAD" else request.method
        return await handlers[method](request, caller)

    return _routes(path, endpoint, list(handlers))


def page(path: str, handler: Page) -> list[Route]:
    """Return the routes of what anyone may GET, keys or not: it tells nothing of any project."""
    return _routes(path, handler, ["GET"])


def _routes(path: str, endpoint: Page, methods: list[str]) -> list[Route]:
    routes = [Route(path, endpoint, methods=methods)]
    if not path.endswith("/"):
        routes.append(Route(f"{path}/", endpoint, methods=methods))
    return routes


def with_idempotency_key(request: Request, caller: Caller) -> Caller:
    """Return `caller` with the key under which it creates something.

    Raises:
        InvalidRequestError: the header `Idempotency-Key` holds none.
    """
    key = checks.idempotency_key_of(request.headers.get("idempotency-key", ""))
    return replace(caller, idempotency_key=key)


def refuse_encoded(request: Request) -> None:
    """Refuse a body that is compressed.

    Raises:
        UnsupportedMediaError: it has a content encoding.
    """
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", ""):
        raise UnsupportedMediaError(
            f"Content-Encoding {encoding[:50]} is not supported; send the body as it is."
        )


async def body_chunks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it comes.

    Raises:
        UnsupportedMediaError: it is compressed.
        InvalidRequestError: nothing came for too long, or too little.
        ClientDisconnect: the client went away.
    """
    refuse_encoded(request)
    pace = Pace()
    more = True
    while more:
        message = await pace.wait(request.receive())
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        pace.came(len(chunk))
        if chunk:
            yield chunk
        more = message.get("more_body", False)


async def read_body(request: Request, *, maximum: int = MAX_JSON_BYTES) -> bytes:
    """Return the whole body.

    Raises:
        TooLargeError: it has more than `maximum` bytes.
        InvalidRequestError: it takes too long.
        UnsupportedMediaError: it is compressed.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(JSON_SECONDS):
            async for chunk in body_chunks(request):
                body += chunk
                if len(body) > maximum:
                    raise TooLargeError(f"A JSON body may have at most {maximum} bytes.")
    except TimeoutError:
        raise InvalidRequestError(
            f"The body was not there within {JSON_SECONDS:.0f} seconds; send it again."
        ) from None
    return bytes(body)
