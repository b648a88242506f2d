"""Completing an upload: its parts become one file, whose bytes are written no second time."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from typing import Final

import sqlalchemy as sa

from protos.nightshift.v1 import uploads_pb2
from services.kit.process.log import get_logger
from services.kit.wire.errors import InvalidRequestError, LostError
from services.kit.wire.ids import FileId, ProjectId
from services.store import memory
from services.store.blobs.base import BlobMissingError
from services.store.context import Context
from services.store.domain.index.line_index import LineIndex, LineIndexer
from services.store.domain.index.part_index import PartIndex, PartJoiner
from services.store.files import files_repo, intake, uploads_repo
from services.store.files.upload_file import expires_at, refuse_unreadable
from services.store.inputs.input_reader import Parts, read_span, read_whole

_log = get_logger(__name__)

_READ_BYTES: Final = 1024 * 1024
_MD5: Final = re.compile(r"[0-9A-Fa-f]{32}")
Row = uploads_repo.Row
_Rows = Sequence[Row]


class Completer:
    """Makes files of uploads; of one at a time, so that several indexes are never held at once."""

    def __init__(self, context: Context) -> None:
        """Complete uploads of `context`."""
        self._context = context
        self._one = asyncio.Lock()

    async def complete(
        self, project_id: ProjectId, request: uploads_pb2.CompleteUploadRequest
    ) -> uploads_repo.Completed:
        """Make a file of an upload's parts; an equal request later returns the same.

        Raises:
            NotFoundError: the upload is unknown, or another project's.
            InvalidRequestError: it has ended, or parts, sizes, MD5 or content do not fit.
        """
        check(request)
        completed_by = fingerprint(request)
        earlier, upload, rows = await self._look(project_id, request.upload_id, completed_by)
        if earlier is not None:
            return earlier
        parts = listed(rows, request.part_ids)
        check_size(upload, parts)
        try:
            if request.HasField("md5"):
                await self._check_md5(_spans(parts), request.md5)
            async with self._one:
                try:
                    return await self._make(upload, parts, completed_by)
                finally:
                    if upload.bytes >= memory.WORTH_BYTES:
                        await memory.give_back()
        except BlobMissingError as error:
            # Where it ended meanwhile and was swept while it was read, that is what is said.
            earlier, _, _ = await self._look(project_id, request.upload_id, completed_by)
            if earlier is None:
                _log.error("part_missing", upload=request.upload_id, blob=error.name)
                raise LostError(
                    f"A part of upload {request.upload_id} is missing from the server's storage. "
                    "Cancel this upload and begin another.",
                    code="content_lost",
                    param="upload_id",
                ) from None
            return earlier

    async def _look(
        self, project_id: ProjectId, upload_id: str, completed_by: str
    ) -> tuple[uploads_repo.Completed | None, Row, _Rows]:
        """Return what an equal request made, else a pending upload and its parts."""
        now_at = self._context.now_ms() // 1000

        def look(connection: sa.Connection) -> tuple[uploads_repo.Completed | None, Row, _Rows]:
            upload = uploads_repo.get(connection, upload_id, project_id)
            earlier = uploads_repo.completed_before(connection, upload, completed_by, now_at)
            if earlier is None:
                uploads_repo.refuse_ended(upload, now_at)
            return earlier, upload, uploads_repo.parts_of(connection, upload_id)

        return await self._context.db.read(look)

    async def _make(self, upload: Row, parts: _Rows, completed_by: str) -> uploads_repo.Completed:
        if upload.purpose != "batch":
            return await self._record(upload, self._file(upload, parts, None), completed_by)
        index = await self._index(upload, parts)
        await refuse_unreadable(self._context.blobs, index, _spans(parts))
        name = await intake.announce(self._context, ProjectId(upload.project_id), "index")
        try:
            await self._context.blobs.put(
                "upload.index_write", name, intake.in_turn(index.pieces())
            )
            file = self._file(upload, parts, name)
            completed = await self._record(upload, file, completed_by)
        except BaseException:
            intake.give_up(self._context, [name])
            raise
        if completed.upload.file_id != file.id:
            # An equal request was first.
            intake.give_up(self._context, [name])
        return completed

    async def _record(
        self, upload: Row, file: files_repo.NewFile, completed_by: str
    ) -> uploads_repo.Completed:
        completed = await self._context.db.write(
            "upload.complete",
            lambda connection: uploads_repo.complete(
                connection, upload, file, completed_by=completed_by
            ),
        )
        self._context.wake("sweeper")
        return completed

    def _file(self, upload: Row, parts: _Rows, index_blob: str | None) -> files_repo.NewFile:
        created_at = self._context.now_ms() // 1000
        return files_repo.NewFile(
            id=FileId(f"file-{self._context.new_id()}"),
            project_id=ProjectId(upload.project_id),
            purpose=upload.purpose,
            filename=upload.filename,
            bytes=upload.bytes,
            created_at=created_at,
            expires_at=expires_at(upload.purpose, upload.file_expires_seconds, created_at),
            parts=_spans(parts),
            parts_live=True,
            index_blob=index_blob,
        )

    async def _check_md5(self, spans: Parts, expected: str) -> None:
        md5 = hashlib.md5(usedforsecurity=False)
        async for data in self._content(spans):
            await asyncio.to_thread(md5.update, data)
        if md5.hexdigest() != expected.lower():
            raise InvalidRequestError(
                f"The MD5 of the parts in this order is {md5.hexdigest()}, not "
                f"{expected.lower()}. Check the order of 'part_ids', or send the parts again.",
                param="md5",
            )

    async def _index(self, upload: Row, parts: _Rows) -> LineIndex:
        """Join the parts' indexes: of their content one line each is read."""
        blobs, spans = self._context.blobs, _spans(parts)
        settings = self._context.settings
        joiner = PartJoiner(
            max_lines=settings.max_batch_lines,
            max_line_bytes=settings.max_line_bytes,
            key=upload.hash_key.encode(),
        )
        # Of the parts before, only those that the open line lies in are looked through.
        first = base = 0
        for number, part in enumerate(parts):
            index = PartIndex.from_bytes(await read_whole(blobs, part.index_blob))
            if not index.complete:
                return await self._index_content(upload, spans)
            offset, length = joiner.wanted(index)
            while first < number and base + spans[first][1] <= offset:
                base += spans[first][1]
                first += 1
            line = await read_span(blobs, spans[first : number + 1], offset - base, length)
            await asyncio.to_thread(joiner.add, index, line)
        offset, length = joiner.wanted_at_end()
        line = await read_span(blobs, spans[first:], offset - base, length)
        return await asyncio.to_thread(joiner.finish_file, line)

    async def _index_content(self, upload: Row, spans: Parts) -> LineIndex:
        """Index the bytes themselves: a part has more distinct names than its index holds."""
        settings = self._context.settings
        indexer = LineIndexer(
            max_lines=settings.max_batch_lines,
            max_line_bytes=settings.max_line_bytes,
            key=upload.hash_key.encode(),
        )
        async for data in self._content(spans):
            await asyncio.to_thread(indexer.feed, data)
        return await asyncio.to_thread(indexer.finish)

    async def _content(self, spans: Parts) -> AsyncIterator[bytes]:
        """Yield the bytes of parts; one that is shorter than it was is missing."""
        for name, size in spans:
            for offset in range(0, size, _READ_BYTES):
                length = min(_READ_BYTES, size - offset)
                yield await read_span(self._context.blobs, [(name, size)], offset, length)


def check(request: uploads_pb2.CompleteUploadRequest) -> None:
    """Refuse a request that fits no upload.

    Raises:
        InvalidRequestError: too many parts, one of them twice, or no MD5.
    """
    if len(request.part_ids) > uploads_repo.MAX_PARTS:
        raise InvalidRequestError(
            f"An Upload takes at most {uploads_repo.MAX_PARTS} parts.", param="part_ids"
        )
    seen: set[str] = set()
    for part_id in request.part_ids:
        if part_id in seen:
            raise InvalidRequestError(
                f"The part {part_id[:100]} is listed twice.", param="part_ids"
            )
        seen.add(part_id)
    if request.HasField("md5") and not _MD5.fullmatch(request.md5):
        raise InvalidRequestError(
            "Invalid 'md5': expected the 32 hex digits of the whole content's MD5.",
            code="invalid_value",
            param="md5",
        )


def fingerprint(request: uploads_pb2.CompleteUploadRequest) -> str:
    """Return what tells an equal request from another."""
    said = [request.md5.lower(), *request.part_ids]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def listed(rows: _Rows, part_ids: Sequence[str]) -> _Rows:
    """Return the parts asked for, in the order asked for.

    Raises:
        InvalidRequestError: one is no part of this upload.
    """
    known = {row.id: row for row in rows}
    for part_id in part_ids:
        if part_id not in known:
            raise InvalidRequestError(f"The Upload has no part {part_id[:100]}.", param="part_ids")
    return [known[part_id] for part_id in part_ids]


def check_size(upload: Row, parts: _Rows) -> None:
    """Refuse parts that do not add up to what was declared.

    Raises:
        InvalidRequestError: they have more or fewer bytes.
    """
    size = sum(part.bytes for part in parts)
    if size != upload.bytes:
        raise InvalidRequestError(
            f"The parts listed have {size} bytes, but the Upload was created with {upload.bytes}. "
            "List all parts, or create another Upload.",
            param="part_ids",
        )


def _spans(parts: _Rows) -> list[tuple[str, int]]:
    return [(part.blob, part.bytes) for part in parts]
