"""What the store asks of a place for blobs."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import ClassVar, final

from services.kit.process import failpoints
from services.kit.wire.errors import UnavailableError

Content = bytes | AsyncIterator[bytes | memoryview]


class BlobMissingError(Exception):
    """No blob of that name, or less of it than there was: something outside deleted or cut it."""

    def __init__(self, name: str) -> None:
        """Name the blob."""
        super().__init__(name)
        self.name = name


class BlobDamagedError(BlobMissingError):
    """The blob is there, but is not what was written."""


class BlobUnreadableError(UnavailableError):
    """The blob is there, and its place does not give it, while it may give all others.

    That may pass, so that it is not lost. Clients are told to come back; whose batch it is, why.
    """

    RETRY_SECONDS: ClassVar[int] = 5

    def __init__(self, name: str, why: str) -> None:
        """Name the blob, and say why in the place's own words."""
        super().__init__(
            "The store's storage does not work right now, so that nothing was read; try again.",
            retry_after_seconds=self.RETRY_SECONDS,
        )
        self.name = name
        self.why = why


BlobTrouble = BlobMissingError | BlobUnreadableError
"""What keeps a batch from going on until its blob is there and can be read."""


class Blobs(ABC):
    """A place for immutable blobs under names of the form `project/kind/hex`.

    What is common to all places stands here: each write and each deletion passes its failpoints.
    """

    late_seconds: ClassVar[int] = 0
    """How long what was sent of a blob may still arrive once its writer has given up on it."""

    @final
    async def put(self, step: str, name: str, content: Content) -> int:
        """Write a blob under a name never used before; durable on return.

        What `content` raises leaves nothing behind that has this name, and comes back.

        Args:
            step: names the failpoints around it (`docs/durability.md`).
            name: of the blob, as `Context.blob_name` makes them.
            content: the bytes, or pieces of them in order.

        Returns:
            The number of bytes written.

        Raises:
            UnavailableError: it cannot be written now; nothing of it has this name.
        """
        failpoints.before(step)
        size = await self._put(step, name, content)
        failpoints.after(step)
        return size

    @final
    async def delete(self, step: str, *names: str) -> None:
        """Remove blobs, all at once where the place can; harmless when they are gone.

        Raises:
            UnavailableError: some may still be there.
        """
        failpoints.before(step)
        await self._delete(names)
        failpoints.after(step)

    @abstractmethod
    async def read(self, name: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes from `offset`; fewer only at the blob's end.

        Raises:
            BlobMissingError: there is no such blob.
            BlobUnreadableError: it is there and is not given.
            UnavailableError: nothing can be read now.
        """

    @abstractmethod
    async def look(self) -> None:
        """Return where the place can be worked on, as far as can be seen without writing there.

        Raises:
            UnavailableError: it cannot; the message says why and what to do, to the operator.
        """

    async def close(self) -> None:  # noqa: B027 - most places hold nothing
        """Let go of what the place holds; nothing is written after it."""

    @abstractmethod
    async def _put(self, step: str, name: str, content: Content) -> int:
        """See `put`."""

    @abstractmethod
    async def _delete(self, names: tuple[str, ...]) -> None:
        """See `delete`."""
