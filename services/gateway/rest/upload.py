"""An upload on its way through: multipart from the client, frames to the store.

Parts come in any order (Node's client sends the file first and the purpose last), and often without
a length, so that the purpose is judged when it arrives and the store's stream is cancelled where it
does not fit. Memory is one frame and one chunk, whatever the file's size.
"""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

import prometheus_client
from starlette.requests import Request

from protos.nightshift.v1 import files_pb2, uploads_pb2
from services.gateway import checks
from services.gateway.auth import Caller
from services.gateway.rest.multipart import (
    Event,
    Field,
    FileData,
    FilePart,
    MultipartReader,
    boundary_of,
)
from services.gateway.rest.routes.resource import body_chunks
from services.gateway.store import FileUpload, PartUpload, Store
from services.kit.wire.errors import InvalidRequestError

_BYTES = prometheus_client.Counter(
    "nightshift_upload_bytes_total", "Bytes of files taken from clients, refused ones included."
)

_FORM_BYTES: Final = 16 * 1024
"""More than all of a form but its file takes, so that what is left of a declared length is file."""

_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


async def receive_upload(request: Request, store: Store, caller: Caller) -> files_pb2.File:
    """Pass an upload on and return the file that the store made of it.

    Raises:
        InvalidRequestError: the form does not fit.
        NightshiftError: the store has refused the file.
        ClientDisconnect: the client went away; nothing stays behind.
    """
    async with contextlib.AsyncExitStack() as stack:
        form = _FileForm(store, caller, stack, request.headers.get("content-length", ""))
        await _read(request, form.take)
        return await form.finish()


async def receive_part(
    request: Request, store: Store, caller: Caller, upload_id: str
) -> uploads_pb2.UploadPart:
    """Pass a part of an upload on and return what the store made of it.

    Raises:
        InvalidRequestError: the form does not fit.
        NightshiftError: the store has refused the part.
        ClientDisconnect: the client went away; nothing stays behind.
    """
    async with contextlib.AsyncExitStack() as stack:
        form = _PartForm(store, caller, stack, upload_id)
        await _read(request, form.take)
        return await form.finish()


async def _read(request: Request, take: Callable[[Event], Awaitable[None]]) -> None:
    """Hand on the events of a request's form as they come."""
    reader = MultipartReader(boundary_of(request.headers.get("content-type", "")))
    async for chunk in body_chunks(request):
        for event in reader.feed(chunk):
            await take(event)
    reader.close()


class _PartForm:
    """The form of one part of an upload, which means something only by its file `data`."""

    def __init__(
        self, store: Store, caller: Caller, stack: contextlib.AsyncExitStack, upload_id: str
    ) -> None:
        self._store = store
        self._caller = caller
        self._stack = stack
        self._upload_id = upload_id
        self._part: PartUpload | None = None
        self._in_data = False

    async def take(self, event: Event) -> None:
        """Take the next part of the form, or piece of one."""
        match event:
            case FilePart(name, _):
                self._in_data = name == "data"
                if self._in_data:
                    await self._open()
            case FileData(data):
                if self._in_data and self._part is not None:
                    _BYTES.inc(len(data))
                    await self._part.data(data)
            case Field("data", _):
                raise InvalidRequestError(
                    "The part 'data' has no filename. (HINT: with curl, use -F data=@FILE)"
                )
            case Field():
                # Ignored, as any form's are: proxies add their own.
                pass

    async def _open(self) -> None:
        if self._part is not None:
            raise InvalidRequestError("A form takes one 'data'; send each in a request of its own.")
        part = await self._stack.enter_async_context(self._store.upload_part(self._caller))
        header = uploads_pb2.UploadPartHeader(upload_id=self._upload_id)
        await part.write(uploads_pb2.AddUploadPartRequest(header=header))
        self._part = part

    async def finish(self) -> uploads_pb2.UploadPart:
        """End the part; all of the form is there."""
        if self._part is None:
            raise InvalidRequestError("'data' is a required property")
        footer = uploads_pb2.AddUploadPartRequest(footer=uploads_pb2.UploadPartFooter())
        return (await self._part.finish(footer)).part


class _FileForm:
    """The parts of one file's form."""

    def __init__(
        self, store: Store, caller: Caller, stack: contextlib.AsyncExitStack, content_length: str
    ) -> None:
        self._store = store
        self._caller = caller
        self._stack = stack
        self._content_length = content_length
        self._fields: dict[str, str] = {}
        self._upload: FileUpload | None = None
        self._in_file = False

    async def take(self, event: Event) -> None:
        """Take the next part, or piece of one."""
        match event:
            case FilePart(name, filename):
                self._in_file = name == "file"
                if self._in_file:
                    await self._open(filename)
            case FileData(data):
                if self._in_file and self._upload is not None:
                    _BYTES.inc(len(data))
                    await self._upload.data(data)
            case Field(name, value):
                self._set(name, value)

    async def _open(self, filename: str) -> None:
        if self._upload is not None:
            raise InvalidRequestError("A form takes one 'file'; send each in a request of its own.")
        if not filename:
            raise InvalidRequestError("The part 'file' needs a filename that is not empty.")
        header = files_pb2.UploadFileHeader(filename=filename)
        declared = self._content_length
        if declared.isascii() and declared.isdigit() and int(declared) > _FORM_BYTES:
            header.declared_bytes = int(declared) - _FORM_BYTES
        upload = await self._stack.enter_async_context(self._store.upload(self._caller))
        await upload.write(files_pb2.UploadFileRequest(header=header))
        self._upload = upload

    def _set(self, name: str, value: str) -> None:
        if name == "file":
            raise InvalidRequestError(
                "The part 'file' has no filename. (HINT: with curl, use -F file=@FILE)"
            )
        if name not in _FIELDS:
            if name.startswith("expires_after"):
                raise InvalidRequestError(
                    f"Unknown parameter: '{name[:100]}'.",
                    code="unknown_parameter",
                    param=name[:100],
                )
            # Others are ignored, as any form's are: proxies add their own.
            return
        if name in self._fields:
            raise InvalidRequestError(f"The form has '{name}' twice.")
        self._fields[name] = checks.purpose_of(value) if name == "purpose" else value

    async def finish(self) -> files_pb2.File:
        """End the upload; all parts are there."""
        if self._upload is None:
            raise InvalidRequestError("'file' is a required property")
        purpose = self._fields.get("purpose")
        if purpose is None:
            raise InvalidRequestError("'purpose' is a required property")
        expiry = checks.form_expiry(
            self._fields.get("expires_after[anchor]"), self._fields.get("expires_after[seconds]")
        )
        footer = files_pb2.UploadFileFooter(purpose=purpose, expires_after=expiry)
        return (await self._upload.finish(files_pb2.UploadFileRequest(footer=footer))).file
