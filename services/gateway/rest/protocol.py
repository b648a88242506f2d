"""HTTP/1.1 as uvicorn speaks it, with a bound on heads and errors in OpenAI's envelope."""

import asyncio
from typing import Any, Final

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.callers import network_of
from services.gateway.rest.envelope import error_object
from services.gateway.rest.middleware import API_VERSION
from services.gateway.shares import Shares
from services.kit.process.log import get_logger
from services.kit.wire.errors import InvalidRequestError, NightshiftError, UnavailableError
from services.kit.wire.ids import uuid7_hex

_log = get_logger(__name__)

MAX_HEAD_BYTES: Final = 64 * 1024
"""Request line and headers together, and anything else that is not a body."""

HEAD_SECONDS: Final = 60.0
"""A connection that has not told its request by then is closed."""

BUSY_HEAD_SECONDS: Final = 5.0
"""The same where more than half of all connections are taken."""

MAX_CONNECTIONS: Final = 8_192
"""Connections at once; an idle one takes some 10 KiB."""
OTHER_DESCRIPTORS: Final = 256 + 512
"""Files and sockets that the process needs beside them: its log, the store; and those of gRPC."""
_LOG_SECONDS: Final = 60.0

LINGER_SECONDS: Final = 1.0
"""A refused client may still be sending; closing on it at once would take the answer from it."""


class Connections:
    """All connections of a gateway: no address has so many that others find none."""

    def __init__(self, descriptors: int) -> None:
        """Keep to what a process with so many file descriptors can hold."""
        self.shares = Shares(min(MAX_CONNECTIONS, max(16, descriptors - OTHER_DESCRIPTORS)))
        self._refused = 0
        self._logged_at = -_LOG_SECONDS

    def refuse(self, address: str, now: float) -> None:
        """Count a connection that was refused; the log hears of them once a minute."""
        self._refused += 1
        if now - self._logged_at >= _LOG_SECONDS:
            _log.warning(
                "connections_refused", client=address, count=self._refused, most=self.shares.most
            )
            self._logged_at, self._refused = now, 0

    @property
    def head_seconds(self) -> float:
        """How long a connection may take to say what it wants."""
        few = self.shares.taken <= self.shares.most // 2
        return HEAD_SECONDS if few else BUSY_HEAD_SECONDS


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a head that does not end, and a connection more than an address may have.

    The parser itself would collect a head without limit.
    """

    all_connections: Connections
    """All of them; set by `protocol_of`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the protocol of one connection, as uvicorn does."""
        super().__init__(*args, **kwargs)
        self._holder: str | None = None
        self._unread = 0
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection; annotated as uvicorn does."""
        peer = transport.get_extra_info("peername")
        holder = network_of(str(peer[0])) if peer else ""
        shares = self.all_connections.shares
        if not shares.may_take(holder):
            self._refused = True
            self.all_connections.refuse(holder, self.loop.time())
            transport.write(_TOO_MANY)
            transport.close()
            return
        shares.take(holder)
        self._holder = holder
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        if self._holder is None:
            # Refused at once: uvicorn never had it.
            return
        self.all_connections.shares.give_back(self._holder)
        self._head_done()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(
                self.all_connections.head_seconds, self.transport.close
            )

    def _head_done(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def data_received(self, data: bytes) -> None:
        """Take bytes from the connection."""
        if self._refused:
            return
        self._unread += len(data)
        super().data_received(data)
        if self._unread > MAX_HEAD_BYTES and not self._refused:
            self.send_400_response(
                f"The request's head is longer than {MAX_HEAD_BYTES} bytes, or malformed."
            )

    def on_message_begin(self) -> None:
        """See a request's first byte, which stops the timer that uvicorn runs between requests."""
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        """Start a request."""
        self._unread = 0
        self._head_done()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._unread = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP request, in the envelope, and close."""
        self._refused = True
        # There is no cycle before the first request, whatever uvicorn's annotation says.
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            started = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
            if started:
                # A second status line inside the answer on its way would only confuse.
                self.transport.close()
                return
        self.transport.write(_refusal(msg))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def protocol_of(connections: Connections) -> type[BoundedProtocol]:
    """Return the protocol of a server that has these connections."""
    return type("BoundedProtocol", (BoundedProtocol,), {"all_connections": connections})


def _refusal(message: str) -> bytes:
    return _answer(b"400 Bad Request", InvalidRequestError(message))


def _answer(status: bytes, error: NightshiftError) -> bytes:
    body = orjson.dumps(error_object(error))
    head = (
        b"HTTP/1.1 " + status + b"\r\n"
        b"content-type: application/json\r\n"
        b"x-content-type-options: nosniff\r\n"
        b"content-length: %d\r\n"
        b"x-request-id: req_%s\r\n"
        b"openai-version: %s\r\n"
        b"connection: close\r\n\r\n"
    )
    return head % (len(body), uuid7_hex().encode(), API_VERSION) + body


_TOO_MANY: Final = _answer(
    b"503 Service Unavailable\r\nretry-after: 1",
    UnavailableError(
        "There are too many connections from this address. Close some, or use them again."
    ),
)
