"""What the store asks of a place for blobs."""

from collections.abc import AsyncIterator
from typing import Protocol


class BlobMissingError(Exception):
    """No blob of that name; its row named it, so something outside deleted it."""


class Blobs(Protocol):
    """A place for immutable blobs under names of the form `project/kind/hex`."""

    async def put(
        self, step: str, name: str, content: bytes | AsyncIterator[bytes | memoryview]
    ) -> int:
        """Write a blob under a name never used before; durable on return.

        `step` names the failpoints around it (`docs/durability.md`).
        What `content` raises leaves nothing behind.

        Returns:
            The number of bytes written.
        """
        ...

    async def read(self, name: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes from `offset`; fewer only at the blob's end.

        Raises:
            BlobMissingError: there is no such blob.
        """
        ...

    async def delete(self, step: str, name: str) -> None:
        """Remove a blob; harmless when it is gone."""
        ...
