"""One upload: frames in, a durable and indexed file out, or nothing at all."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import sqlalchemy as sa

from protos.nightshift.v1 import files_pb2
from services.kit.wire.client_numbers import check_range
from services.kit.wire.errors import InvalidRequestError, TooLargeError
from services.kit.wire.ids import FileId, ProjectId
from services.store.admin import idempotency_repo, quota_repo
from services.store.blobs.base import Blobs
from services.store.context import Context
from services.store.domain.index.body_shape import Shape, refusal
from services.store.domain.index.line_index import LineIndex, LineIndexer
from services.store.domain.validation import validate
from services.store.domain.validation.explain import no_object
from services.store.files import files_repo, intake
from services.store.inputs.input_reader import Parts, read_span

PURPOSES = ("fine-tune", "assistants", "batch", "user_data", "vision", "evals")
MAX_FILENAME_CHARACTERS = 4_096
MIN_EXPIRY_SECONDS = 3_600
MAX_EXPIRY_SECONDS = 2_592_000
BATCH_EXPIRY_SECONDS = MAX_EXPIRY_SECONDS
"""Expiry of a batch input for which none is asked."""

Row = sa.Row[Any]
Requests = AsyncIterator[files_pb2.UploadFileRequest]


class Upload:
    """Receives one file. The purpose may come after the bytes, so every file is indexed."""

    def __init__(
        self, context: Context, project_id: ProjectId, *, idempotency_key: str = ""
    ) -> None:
        """Prepare to receive a file of `project_id`, once for all uploads of the same key."""
        self._context = context
        self._project_id = project_id
        self._idempotency_key = idempotency_key
        # Hashed only where an equal request has to be told from another.
        self._hash = hashlib.sha256() if idempotency_key else None
        settings = context.settings
        self._most = max(settings.max_file_bytes, settings.max_batch_file_bytes)
        self._indexer: LineIndexer | None = LineIndexer(
            max_lines=settings.max_batch_lines,
            max_line_bytes=settings.max_line_bytes,
            key=context.new_id().encode(),
        )
        self._long_line = context.long_lines.of(project_id)
        self._size = 0
        # Names of all blobs of this upload, to be given up together.
        self._written: list[str] = []
        self._footer: files_pb2.UploadFileFooter | None = None
        self._quota = quota_repo.Quota(project_id=project_id, limit=None)

    async def receive(self, requests: Requests) -> files_pb2.File:
        """Store the file and return it.

        Raises:
            InvalidRequestError: header, footer or content do not fit, or the project's quota.
            TooLargeError: more bytes than allowed.
            UnavailableError: nothing can be stored now.
        """
        header = await self._header(requests)
        self._quota = await intake.room_for(self._context, self._project_id)
        self._quota.require(header.declared_bytes, param="file")
        content = await self._announce("file")
        try:
            await self._context.blobs.put("file.write", content, self._data(requests))
            return await self._record(header, content)
        except BaseException:
            intake.give_up(self._context, self._written)
            raise
        finally:
            self._long_line.end()

    async def _announce(self, kind: str) -> str:
        name = await intake.announce(self._context, self._project_id, kind)
        self._written.append(name)
        return name

    async def _header(self, requests: Requests) -> files_pb2.UploadFileHeader:
        first = await intake.next_frame(requests)
        if first is None or not first.HasField("header"):
            raise InvalidRequestError("The first frame of an upload must be its header.")
        header = first.header
        check_filename(header.filename, param="file")
        if header.HasField("declared_bytes") and header.declared_bytes > self._most:
            raise self._too_large(self._most)
        return header

    async def _data(self, requests: Requests) -> AsyncIterator[bytes]:
        while (request := await intake.next_frame(requests)) is not None:
            if request.HasField("footer"):
                self._footer = request.footer
                self._check_footer(request.footer)
                return
            data = request.data
            self._size += len(data)
            if self._size > self._most:
                raise self._too_large(self._most)
            self._quota.require(self._size, param="file")
            await self._context.disk.require_room()
            if self._hash is not None:
                await asyncio.to_thread(self._hash.update, data)
            if self._indexer is not None:
                if self._size > self._context.settings.max_batch_file_bytes:
                    # Too large for a batch, so that nobody will ask for its index.
                    self._indexer = None
                else:
                    await self._long_line.feed(self._indexer, data)
            yield data
        raise InvalidRequestError("The upload broke off before its end; upload the file again.")

    def _check_footer(self, footer: files_pb2.UploadFileFooter) -> None:
        if not footer.HasField("purpose"):
            raise InvalidRequestError("'purpose' is a required property")
        check_purpose(footer.purpose)
        limit = self._context.settings.max_batch_file_bytes
        if footer.purpose == "batch" and self._size > limit:
            raise InvalidRequestError(
                f"A batch input may have {limit} bytes, this file has {self._size}. Split it into "
                "several batches.",
                param="file",
            )
        if footer.HasField("expires_after"):
            check_expiry(footer.expires_after, "expires_after")

    def _too_large(self, limit: int) -> TooLargeError:
        return TooLargeError(f"A file may have at most {limit} bytes; split it.", param="file")

    async def _record(self, header: files_pb2.UploadFileHeader, content: str) -> files_pb2.File:
        footer = self._footer
        assert footer is not None  # `_data` ends with one, or raises
        index_blob = None
        if footer.purpose == "batch" and self._indexer is not None:
            index = await self._long_line.run(self._indexer, self._indexer.finish)
            await refuse_unreadable(self._context.blobs, index, [(content, self._size)])
            index_blob = await self._store_index(index)
        now_ms = self._context.now_ms()
        created_at = now_ms // 1000
        seconds = footer.expires_after.seconds if footer.HasField("expires_after") else None
        file = files_repo.NewFile(
            id=FileId(f"file-{self._context.new_id()}"),
            project_id=self._project_id,
            purpose=footer.purpose,
            filename=header.filename,
            bytes=self._size,
            created_at=created_at,
            expires_at=expires_at(footer.purpose, seconds, created_at),
            parts=[(content, self._size)],
            index_blob=index_blob,
        )
        row = await self._insert(file, now_ms)
        if row.id != file.id:
            # An equal upload was first, so that nothing will name what this one wrote.
            intake.give_up(self._context, self._written)
        return to_proto(row)

    async def _insert(self, file: files_repo.NewFile, now_ms: int) -> Row:
        asked = self._footer is not None and self._footer.HasField("expires_after")
        request = idempotency_repo.keyed(
            self._project_id,
            self._idempotency_key,
            "file",
            "" if self._hash is None else self._hash.hexdigest(),
            file.filename,
            file.purpose,
            self._footer.expires_after.seconds if self._footer is not None and asked else None,
        )
        default = self._context.settings.project_quota_bytes

        def make(connection: sa.Connection) -> Row:
            # What decides: others may have added to it since it was looked at.
            now_at = now_ms // 1000
            quota = quota_repo.quota(connection, file.project_id, default, now_at)
            quota.require(file.bytes, param="file")
            return files_repo.insert(connection, file)

        return await self._context.db.write(
            "file.create",
            lambda connection: idempotency_repo.once(
                connection,
                request,
                now_ms,
                make=lambda: make(connection),
                find=lambda file_id: files_repo.get(
                    connection, file_id, self._project_id, now_ms // 1000
                ),
            ),
        )

    async def _store_index(self, index: LineIndex) -> str:
        name = await self._announce("index")
        await self._context.blobs.put("file.index_write", name, index.to_bytes())
        return name


async def refuse_unreadable(blobs: Blobs, index: LineIndex, parts: Parts) -> None:
    """Refuse a batch input that no line of can be a request, saying what it looks like instead.

    Args:
        blobs: where its content lies already.
        index: of its lines.
        parts: of its content, in order.

    Raises:
        InvalidRequestError: always for such a file.
        BlobMissingError: its content is not there any more.
    """
    shape = validate.unreadable(index)
    if shape is None:
        return
    message = refusal(shape)
    if shape is Shape.LINES:
        # The file as a whole looks right, so that only a line tells what is wrong with it.
        raw = await read_span(blobs, parts, *index.span(0))
        fault = await asyncio.to_thread(no_object, raw)
        if fault is not None:
            message += f" Line {index.physical_line(0)}: {fault[1]}"
    raise InvalidRequestError(message)


def check_purpose(purpose: str) -> None:
    """Refuse a purpose that no upload may have.

    Raises:
        InvalidRequestError: it is none of `PURPOSES`.
    """
    if purpose not in PURPOSES:
        raise InvalidRequestError(
            f"'{purpose}' is not one of {list(PURPOSES)} - 'purpose'", param="purpose"
        )


def check_filename(filename: str, *, param: str) -> None:
    """Refuse a name that is empty or endless; any other is a file's name, never a path.

    Raises:
        InvalidRequestError: it does not fit.
    """
    if not filename or len(filename) > MAX_FILENAME_CHARACTERS:
        raise InvalidRequestError(
            f"A file needs a name of 1 to {MAX_FILENAME_CHARACTERS} characters.", param=param
        )


def check_expiry(expires_after: files_pb2.ExpiresAfter, name: str) -> None:
    """Refuse an expiry that is out of range.

    Raises:
        InvalidRequestError: wrong anchor or seconds.
    """
    if expires_after.anchor != "created_at":
        raise InvalidRequestError(
            f"Invalid value: '{expires_after.anchor}'. Supported values are: 'created_at'.",
            code="invalid_value",
            param=f"{name}.anchor",
        )
    check_range(f"{name}.seconds", expires_after.seconds, MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS)


def expires_at(purpose: str, seconds: int | None, created_at: int) -> int | None:
    """Return when a file goes by itself, in Unix seconds; None means never.

    Args:
        purpose: decides where no expiry is asked for.
        seconds: expiry asked for, from the file's creation on.
        created_at: when the file was created.
    """
    if seconds is not None:
        return created_at + seconds
    return created_at + BATCH_EXPIRY_SECONDS if purpose == "batch" else None


def to_proto(row: Row) -> files_pb2.File:
    """Return a file's row as its message."""
    return files_pb2.File(
        id=row.id,
        bytes=row.bytes,
        created_at=row.created_at,
        expires_at=row.expires_at,
        filename=row.filename,
        purpose=row.purpose,
        status=row.status,
    )
