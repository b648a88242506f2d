"""How a route is written: a path, a handler for each method, and who is calling."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.auth import Caller
from services.gateway.clients import IDLE_SECONDS
from services.gateway.context import Context
from services.gateway.middleware import request_id_of
from services.kit.errors import InvalidRequestError, TooLargeError, UnsupportedMediaError

MAX_JSON_BYTES: Final = 1024 * 1024
"""Largest JSON body; a batch's own data travels as a file."""

Handler = Callable[[Request, Caller], Awaitable[Response]]


def resource(context: Context, path: str, handlers: Mapping[str, Handler]) -> list[Route]:
    """Return the routes of one path, with and without a slash at its end.

    A redirect is never sent: it would break an upload.

    Args:
        context: knows who is calling.
        path: as Starlette spells it.
        handlers: by method; GET serves HEAD too.
    """

    async def endpoint(request: Request) -> Response:
        caller = await context.caller(
            request.headers.get("authorization", ""), request_id_of(request.scope)
        )
        method = "GET" if request.method == "HEAD" else request.method
        return await handlers[method](request, caller)

    methods = list(handlers)
    routes = [Route(path, endpoint, methods=methods)]
    if not path.endswith("/"):
        routes.append(Route(f"{path}/", endpoint, methods=methods))
    return routes


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
        InvalidRequestError: nothing came for too long.
        ClientDisconnect: the client went away.
    """
    refuse_encoded(request)
    more = True
    while more:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                message = await request.receive()
        except TimeoutError:
            raise InvalidRequestError(
                f"Nothing was received for {IDLE_SECONDS:.0f} seconds; send it again."
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if chunk := message.get("body", b""):
            yield chunk
        more = message.get("more_body", False)


async def read_body(request: Request, *, maximum: int = MAX_JSON_BYTES) -> bytes:
    """Return the whole body.

    Raises:
        TooLargeError: it has more than `maximum` bytes.
        UnsupportedMediaError: it is compressed.
    """
    body = bytearray()
    async for chunk in body_chunks(request):
        body += chunk
        if len(body) > maximum:
            raise TooLargeError(f"A JSON body may have at most {maximum} bytes.")
    return bytes(body)
