"""Sends one event to one place: signed, bounded in time and size, and nowhere private."""

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final, Self

import httpcore2
from standardwebhooks import Webhook

from services.store.webhooks.public_network import AddressNotAllowedError, PublicBackend

TIMEOUT_SECONDS: Final = 15.0
"""From the look-up of the name to the answer's head."""
_CONNECT_SECONDS: Final = 5.0
_REST_SECONDS: Final = 1.0
_REST_BYTES: Final = 64 * 1024
"""What is read of an answer's body, so that the receiver can finish; nothing of it is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One event for one endpoint.

    Attributes:
        id: the header `webhook-id`, by which a receiver knows a repetition.
        url: where to; was checked when it was set.
        payload: the body.
        secrets: each makes a signature; at least one.
    """

    id: str
    url: str
    payload: str
    secrets: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of an attempt.

    Attributes:
        status: HTTP status; None where no answer came.
        error: why it counts as failed; None for a 2xx.
    """

    status: int | None
    error: str | None


class Sender:
    """Posts messages; each over a connection of its own, so that none fails on an old one."""

    def __init__(self, *, allow_private: bool, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Send to public addresses only, unless `allow_private`."""
        self._timeout_seconds = timeout_seconds
        self._agent = f"Nightshift/{version('nightshift')}"
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=ssl.create_default_context(),
            # Whoever sends bounds how many at once; nothing waits for a connection here.
            max_connections=None,
            max_keepalive_connections=0,
            network_backend=PublicBackend(allow_private=allow_private),
        )

    async def __aenter__(self) -> Self:
        """Hold the connections."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close them."""
        await self._pool.aclose()

    async def send(self, message: Message, now: float) -> Answer:
        """Post a message once; redirects are answers like others. Never raises for a receiver.

        Args:
            message: what and where to.
            now: seconds since the epoch, for the signature.
        """
        status: int | None = None
        try:
            async with (
                asyncio.timeout(self._timeout_seconds),
                self._post(message, now) as response,
            ):
                status = response.status
                await _read_rest(response)
        except TimeoutError:
            error = f"no answer within {self._timeout_seconds:g} seconds"
        except AddressNotAllowedError:
            error = "the host is not on the public internet"
        except (httpcore2.TimeoutException, httpcore2.NetworkError) as raised:
            error = f"the connection failed: {_reason(raised)}"
        except (httpcore2.ProtocolError, httpcore2.UnsupportedProtocol, OSError):
            # What came instead is not repeated: users would read other services' words.
            error = "what answers there does not speak HTTP"
        else:
            error = ""
        if status is None:
            return Answer(status=None, error=error)
        # What went wrong after the answer's head does not undo it.
        if 200 <= status < 300:
            return Answer(status=status, error=None)
        return Answer(status=status, error=f"HTTP status {status}")

    @contextlib.asynccontextmanager
    async def _post(self, message: Message, now: float) -> AsyncIterator[httpcore2.Response]:
        at = datetime.datetime.fromtimestamp(int(now), datetime.UTC)
        signatures = [
            Webhook(secret).sign(message.id, at, message.payload) for secret in message.secrets
        ]
        headers: dict[bytes | str, bytes | str] = {
            "content-type": "application/json",
            "user-agent": self._agent,
            "webhook-id": message.id,
            "webhook-timestamp": str(int(now)),
            "webhook-signature": " ".join(signatures),
        }
        async with self._pool.stream(
            "POST",
            message.url,
            headers=headers,
            content=message.payload.encode(),
            extensions={"timeout": {"connect": _CONNECT_SECONDS}},
        ) as response:
            yield response


async def _read_rest(response: httpcore2.Response) -> None:
    """Take a little of the body; whatever happens to it, the answer stands."""
    read = 0
    with contextlib.suppress(TimeoutError, httpcore2.NetworkError, httpcore2.ProtocolError):
        async with asyncio.timeout(_REST_SECONDS):
            async for part in response.aiter_stream():
                read += len(part)
                if read > _REST_BYTES:
                    return


def _reason(error: Exception) -> str:
    """Return a short reason that names no address of ours."""
    return str(error)[:100] or type(error).__name__
