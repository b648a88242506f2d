"""Blobs in a bucket of S3 or of anything that speaks its protocol; through `obstore`."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, ClassVar, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from services.kit.process.log import get_logger
from services.kit.wire.errors import UnavailableError
from services.kit.wire.frames import FRAME_BYTES
from services.store.blobs.base import BlobMissingError, Blobs, BlobUnreadableError, Content
from services.store.blobs.s3.client import open_bucket
from services.store.blobs.s3.faults import RETRY_SECONDS, code_of, status_of, told
from services.store.blobs.s3.look import BucketLook

_log = get_logger(__name__)

PART_BYTES: Final = 5 * 1024 * 1024
"""Size of the parts of a multipart upload, the least that S3 takes; less goes in one request."""
_PARTS_AT_ONCE: Final = 2
_READ_BYTES: Final = 8 * 1024 * 1024
_REQUESTS_AT_ONCE: Final = 32
_STREAMS_AT_ONCE: Final = 32
"""Multipart uploads at a time: each takes 13 MiB of memory (measured, 16 at once)."""
_OWN_STREAMS_AT_ONCE: Final = 8
"""Those of end files and results, which slow clients must not keep waiting."""
_WAIT_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 5.0
_DELETE_AT_ONCE: Final = 1_000


class S3Blobs(Blobs):
    """Objects `prefix/project/kind/hex`. Endpoint, region and keys come from `AWS_` variables."""

    late_seconds: ClassVar[int] = 300
    """Far more than all tries of a request take: what failed may have been done after all."""

    def __init__(self, bucket: str, prefix: str) -> None:
        """Use a bucket, which must exist; nothing is asked of it yet.

        Raises:
            SettingsError: an `AWS_` variable does not fit.
        """
        self._store = open_bucket(bucket, prefix)
        self._look = BucketLook(bucket, prefix)
        self._requests = asyncio.Semaphore(_REQUESTS_AT_ONCE)
        self._streams = asyncio.Semaphore(_STREAMS_AT_ONCE)
        self._own_streams = asyncio.Semaphore(_OWN_STREAMS_AT_ONCE)
        # Uploads that are being given up: they go on when their callers have gone.
        self._ending: set[asyncio.Future[Any]] = set()

    async def look(self) -> None:
        """See `Blobs.look`."""
        await self._look.look()

    async def close(self) -> None:
        """See `Blobs.close`; waits a little for uploads that are being given up."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=_CLOSE_SECONDS)

    # --- writing ------------------------------------------------------------------------------

    async def _put(self, step: str, name: str, content: Content) -> int:
        pieces = _pieces(content)
        async with contextlib.aclosing(pieces):
            first: list[bytes | memoryview] = []
            size = 0
            async for piece in pieces:
                first.append(piece)
                size += len(piece)
                if size > PART_BYTES:
                    break
            else:
                await self._create(name, b"".join(first))
                return size
            own = step.startswith(("finalize.", "result."))
            async with _turn(self._own_streams if own else self._streams):
                return await self._stream(name, first, pieces)

    async def _create(self, name: str, content: bytes) -> None:
        async with _turn(self._requests):
            with told(name):
                try:
                    await obstore.put_async(
                        self._store, name, content, mode="create", use_multipart=False
                    )
                except AlreadyExistsError:
                    # No name is used twice: an earlier try of this request, whose answer was lost.
                    there = await obstore.get_async(self._store, name)
                    if (await there.bytes_async()).to_bytes() != content:
                        raise

    async def _stream(
        self, name: str, first: list[bytes | memoryview], rest: AsyncIterator[bytes | memoryview]
    ) -> int:
        """Send pieces, in parts; the object is there once all are, and not before."""
        feed = _Feed()
        writing = asyncio.ensure_future(
            obstore.put_async(
                self._store,
                name,
                feed,
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )
        )
        size = 0
        try:
            while first:
                piece = first.pop(0)
                await self._offer(name, feed, writing, piece)
                size += len(piece)
            async for piece in rest:
                await self._offer(name, feed, writing, piece)
                size += len(piece)
            await self._offer(name, feed, writing, None)
            with told(name):
                await asyncio.shield(writing)
        except BaseException:
            # The library aborts the upload when its source fails, but not when it is cancelled.
            feed.give_up()
            self._ending.add(writing)
            writing.add_done_callback(self._ended)
            raise
        return size

    async def _offer(
        self,
        name: str,
        feed: "_Feed",
        writing: "asyncio.Future[Any]",
        piece: bytes | memoryview | None,
    ) -> None:
        """Hand over a piece once there is room for it; None is the end."""
        taking = asyncio.ensure_future(feed.put(piece))
        try:
            await asyncio.wait((taking, writing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            taking.cancel()
        if writing.done() and piece is not None:
            with told(name):
                writing.result()
            raise AssertionError("an upload ended before its content did")

    def _ended(self, writing: "asyncio.Future[Any]") -> None:
        self._ending.discard(writing)
        error = None if writing.cancelled() else writing.exception()
        if error is not None and not isinstance(error, _GivenUpError):
            # The library has tried to abort it, and does not say whether that went well.
            _log.warning("upload_perhaps_left", hint="a lifecycle rule of the bucket removes it")

    # --- the rest -------------------------------------------------------------------------------

    async def read(self, name: str, offset: int, length: int) -> bytes:
        """See `Blobs.read`."""
        pieces: list[bytes] = []
        while length > 0:
            wanted = min(length, _READ_BYTES)
            async with _turn(self._requests):
                piece = await self._read(name, offset, wanted)
            pieces.append(piece)
            if len(piece) < wanted:
                break
            offset += wanted
            length -= wanted
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _read(self, name: str, offset: int, length: int) -> bytes:
        try:
            return await self._read_range(name, offset, length)
        except (BlobMissingError, BlobUnreadableError):
            # Whatever lies on the way may answer so. Where the bucket is, it can be listed.
            with told(name):
                await anext(aiter(obstore.list(self._store, chunk_size=1)), None)
            raise

    async def _read_range(self, name: str, offset: int, length: int) -> bytes:
        with told(name):
            try:
                found = await obstore.get_range_async(
                    self._store, name, start=offset, length=length
                )
            except BaseError as error:
                status = status_of(error)
                if status == 416:
                    # Nothing lies there: the blob ends before it.
                    return b""
                if status == 403:
                    # Of this object, such as one that was moved to an archive.
                    raise BlobUnreadableError(name, code_of(error) or "403 Forbidden") from error
                raise
        return found.to_bytes()

    async def _delete(self, names: tuple[str, ...]) -> None:
        for start in range(0, len(names), _DELETE_AT_ONCE):
            some = names[start : start + _DELETE_AT_ONCE]
            async with _turn(self._requests):
                # Of a server that tells so: it is gone, which is what is wanted.
                with contextlib.suppress(BlobMissingError), told(some[0]):
                    await obstore.delete_async(self._store, list(some))


class _GivenUpError(Exception):
    """Ends an upload that will not be completed."""


class _Feed:
    """Pieces on their way to the library, one at a time."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes | memoryview | _GivenUpError | None] = asyncio.Queue(1)

    async def put(self, piece: bytes | memoryview | None) -> None:
        await self._waiting.put(piece)

    def give_up(self) -> None:
        """Let the next read fail, whatever waits."""
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(_GivenUpError())

    def __aiter__(self) -> "_Feed":
        return self

    async def __anext__(self) -> bytes | memoryview:
        piece = await self._waiting.get()
        if isinstance(piece, _GivenUpError):
            raise piece
        if piece is None:
            raise StopAsyncIteration
        return piece


async def _pieces(content: Content) -> AsyncGenerator[bytes | memoryview, None]:
    """Yield content a piece at a time; what is one already is small, or sliced and not copied."""
    if not isinstance(content, bytes):
        async for piece in content:
            yield piece
    elif len(content) <= PART_BYTES:
        yield content
    else:
        for start in range(0, len(content), FRAME_BYTES):
            yield memoryview(content)[start : start + FRAME_BYTES]


@contextlib.asynccontextmanager
async def _turn(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    """Wait for one of the slots, but not for ever."""
    try:
        async with asyncio.timeout(_WAIT_SECONDS):
            await slots.acquire()
    except TimeoutError:
        raise UnavailableError(
            "The store has more to read and write than its blob storage takes; try again.",
            retry_after_seconds=RETRY_SECONDS,
        ) from None
    try:
        yield
    finally:
        slots.release()
