"""HTTP/1.1 as uvicorn speaks it, with a bound on heads and errors in OpenAI's envelope."""

import asyncio
from typing import Any, Final

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.envelope import error_object
from services.gateway.middleware import API_VERSION
from services.kit.errors import InvalidRequestError
from services.kit.ids import uuid7_hex

MAX_HEAD_BYTES: Final = 64 * 1024
"""Request line and headers together, and anything else that is not a body."""

HEAD_SECONDS: Final = 60.0
"""A connection that has not told its request by then is closed."""

LINGER_SECONDS: Final = 1.0
"""A refused client may still be sending; closing on it at once would take the answer from it."""


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a head that does not end: the parser itself would collect it without limit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the protocol of one connection, as uvicorn does."""
        super().__init__(*args, **kwargs)
        self._unread = 0
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection; annotated as uvicorn does."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._head_done()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

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


def _refusal(message: str) -> bytes:
    body = orjson.dumps(error_object(InvalidRequestError(message)))
    head = (
        b"HTTP/1.1 400 Bad Request\r\n"
        b"content-type: application/json\r\n"
        b"content-length: %d\r\n"
        b"x-request-id: req_%s\r\n"
        b"openai-version: %s\r\n"
        b"connection: close\r\n\r\n"
    )
    return head % (len(body), uuid7_hex().encode(), API_VERSION) + body
