"""A file's content on its way out: frames from the store, bytes to the client."""

import asyncio
import contextlib
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from protos.nightshift.v1 import files_pb2
from services.gateway.auth import Caller
from services.gateway.rest.envelope import error_response
from services.gateway.store import FileStream, Store
from services.kit.wire.errors import (
    InternalError,
    InvalidRequestError,
    NightshiftError,
    RangeNotSatisfiableError,
)

SEND_SECONDS: Final = 600.0
"""A client may work on what it has before it takes more, but not for longer than this."""

_NOT_DOWNLOADABLE: Final = frozenset({"assistants", "user_data"})
_RANGE: Final = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.IGNORECASE)
_PLAIN_NAME: Final = re.compile(r"[^A-Za-z0-9 ._()\[\]@+=,~-]")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes asked for: `length` of them from `offset`.

    `ranged`: a range was asked for, be it all there is; who resumes or splits a download looks for
    the 206 that says so.
    """

    offset: int
    length: int
    ranged: bool = False


class ContentResponse(Response):
    """Answers with a file's bytes, whole or one range of them."""

    def __init__(self, store: Store, caller: Caller, file_id: str) -> None:
        """Read `file_id` from `store`."""
        super().__init__()
        self._store = store
        self._caller = caller
        self._file_id = file_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; a client that goes away ends the store's stream."""
        headers = Headers(scope=scope)
        asked = headers.get("range", "")
        known = headers.get("if-none-match", "")
        if scope["method"] == "HEAD" or asked or known:
            file = await self._file()
            if known and _is_known(file, known):
                await Response(status_code=304, headers={"etag": _etag(file)})(scope, receive, send)
                return
            span = _span(asked, file.bytes)
            if "if-range" in headers and headers["if-range"] != _etag(file):
                span = Span(0, file.bytes)
            if span is None:
                await _unsatisfiable(file.bytes)(scope, receive, send)
                return
            if scope["method"] == "HEAD":
                await _start(send, file, span)
                await send({"type": "http.response.body"})
                return
        else:
            span = None
        wanted = files_pb2.ReadFileRequest(file_id=self._file_id)
        if span is not None:
            wanted.offset, wanted.length = span.offset, span.length
        async with self._store.read(wanted, self._caller) as stream:
            await self._send(stream, span, receive, send)

    async def _file(self) -> files_pb2.File:
        answer = await self._store.call(
            self._store.files.GetFile, files_pb2.GetFileRequest(file_id=self._file_id), self._caller
        )
        refuse_download(answer.file)
        return answer.file

    async def _send(
        self, stream: FileStream, span: Span | None, receive: Receive, send: Send
    ) -> None:
        frame = await stream.read()
        if frame is None or not frame.HasField("file"):
            raise InternalError("The file's content came without its description.")
        file = frame.file
        refuse_download(file)
        span = span or Span(0, file.bytes)
        await _start(send, file, span)
        gone = asyncio.create_task(_disconnected(receive))
        gone.add_done_callback(lambda _: stream.cancel())
        try:
            await _pass_on(stream, frame, span.length, send)
        except NightshiftError:
            if not gone.done():
                raise
        finally:
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone


async def _pass_on(
    stream: FileStream, frame: files_pb2.ReadFileResponse | None, left: int, send: Send
) -> None:
    while frame is not None:
        left -= len(frame.data)
        if left < 0:
            raise InternalError("The file's content is longer than it is said to be.")
        if frame.data:
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await send(
                        {"type": "http.response.body", "body": frame.data, "more_body": True}
                    )
            except TimeoutError:
                raise InternalError("The client took nothing for too long.") from None
        frame = await stream.read()
    if left:
        raise InternalError("The file's content is shorter than it is said to be.")
    await send({"type": "http.response.body"})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, file: files_pb2.File, span: Span) -> None:
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", str(span.length).encode()),
        (b"content-disposition", _disposition(file.filename)),
        (b"accept-ranges", b"bytes"),
        (b"etag", _etag(file).encode()),
    ]
    status = 200
    if span.ranged:
        status = 206
        last = span.offset + span.length - 1
        shown = f"bytes {span.offset}-{last}/{file.bytes}"
        headers.append((b"content-range", shown.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


def refuse_download(file: files_pb2.File) -> None:
    """Refuse the content of files that OpenAI does not give back either.

    Raises:
        InvalidRequestError: its purpose is one of them.
    """
    if file.purpose in _NOT_DOWNLOADABLE:
        raise InvalidRequestError(f"Not allowed to download files of purpose: {file.purpose}")


def _etag(file: files_pb2.File) -> str:
    """Return the content's tag: an id names the same bytes for ever."""
    return f'"{file.id}"'


def _is_known(file: files_pb2.File, tags: str) -> bool:
    """Tell whether an `If-None-Match` header names the file's content, which never changes."""
    named = {tag.strip().removeprefix("W/") for tag in tags.split(",")}
    return not named.isdisjoint(("*", _etag(file)))


def _span(asked: str, size: int) -> Span | None:
    """Return what a `Range` header asks of `size` bytes; None where there is no such byte.

    Several ranges, or what is no range of bytes, are answered with the whole, as RFC 9110 allows.
    """
    match = _RANGE.fullmatch(asked.replace(" ", ""))
    if match is None or not (match[1] or match[2]):
        return Span(0, size)
    if not match[1]:
        length = min(int(match[2]), size)
        return Span(size - length, length, ranged=True) if length else None
    first = int(match[1])
    last = min(int(match[2]), size - 1) if match[2] else size - 1
    if match[2] and int(match[2]) < first:
        return Span(0, size)
    return Span(first, last - first + 1, ranged=True) if first < size else None


def _unsatisfiable(size: int) -> Response:
    error = RangeNotSatisfiableError(f"The range lies outside the file, which has {size} bytes.")
    return error_response(error, headers={"content-range": f"bytes */{size}"})


def _disposition(filename: str) -> bytes:
    """Return an attachment's disposition: a plain name for old clients, the true one for others."""
    plain = _PLAIN_NAME.sub("_", filename)
    value = f'attachment; filename="{plain}"'
    if plain != filename:
        value += f"; filename*=UTF-8''{quote(filename, safe='')}"
    return value.encode()
