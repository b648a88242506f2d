"""How fast a client sends what it has announced."""

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from services.kit.wire.errors import InvalidRequestError

T = TypeVar("T")

IDLE_SECONDS: Final = 60.0
"""A client that sends nothing for so long has gone."""
WINDOW_SECONDS: Final = 60.0
"""In so much time of waiting for a client,"""
WINDOW_BYTES: Final = 60 * 1024
"""so much has to come."""


class Pace:
    """Waits for what one client sends, and ends with one that is too slow.

    Only waiting for the client counts: a store that is slow to take it is no fault of the client's.
    """

    def __init__(self) -> None:
        """Begin a window."""
        self._waited = 0.0
        self._came = 0

    async def wait(self, piece: Awaitable[T]) -> T:
        """Return the next piece; tell `came` of its size.

        Raises:
            InvalidRequestError: it did not come for `IDLE_SECONDS`.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                return await piece
        except TimeoutError:
            raise InvalidRequestError(
                f"Nothing was received for {IDLE_SECONDS:.0f} seconds; send it again.",
                code="upload_too_slow",
            ) from None
        finally:
            self._waited += clock() - began

    def came(self, size: int) -> None:
        """Count bytes that came.

        Raises:
            InvalidRequestError: in `WINDOW_SECONDS` of waiting it were fewer than `WINDOW_BYTES`.
        """
        self._came += size
        if self._waited < WINDOW_SECONDS:
            return
        if self._came < WINDOW_BYTES:
            raise InvalidRequestError(
                f"Only {self._came} bytes were received in {WINDOW_SECONDS:.0f} seconds; at least "
                f"{WINDOW_BYTES} are wanted. Send it again over a faster connection.",
                code="upload_too_slow",
            )
        self._waited, self._came = 0.0, 0
