"""One part of an upload: frames in, a durable and indexed blob out, or nothing at all."""

import asyncio
from collections.abc import AsyncIterator

import sqlalchemy as sa
import xxhash

from protos.nightshift.v1 import uploads_pb2
from services.kit.wire.errors import InvalidRequestError
from services.kit.wire.ids import ProjectId
from services.store import memory
from services.store.admin import quota_repo
from services.store.context import Context
from services.store.domain.index.part_index import PartIndexer
from services.store.files import intake, uploads_repo

MAX_PART_BYTES = 64 * 1024 * 1024
"""Largest part; what the official clients send."""

Requests = AsyncIterator[uploads_pb2.AddUploadPartRequest]


class Part:
    """Receives one part."""

    def __init__(self, context: Context, project_id: ProjectId) -> None:
        """Prepare to receive a part of an upload of `project_id`."""
        self._context = context
        self._project_id = project_id
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self._quota = quota_repo.Quota(project_id=project_id, limit=None)
        self._long_line = context.long_lines.of(project_id)

    async def receive(self, requests: Requests) -> uploads_pb2.UploadPart:
        """Store the part and return it.

        Raises:
            NotFoundError: the upload is unknown, or another project's.
            InvalidRequestError: it has ended, or the part does not fit, or the project's quota.
            UnavailableError: nothing can be stored now.
        """
        upload = await self._upload(requests)
        self._quota = await intake.room_for(self._context, self._project_id)
        self._quota.require(0, param="data")
        indexer = self._indexer(upload)
        names = [await intake.announce(self._context, self._project_id, "part")]
        try:
            await self._context.blobs.put(
                "part.write", names[0], self._data(requests, upload, indexer)
            )
            if indexer is not None:
                index = await asyncio.to_thread(indexer.finish_part)
                names.append(await intake.announce(self._context, self._project_id, "partindex"))
                await self._context.blobs.put("part.index_write", names[1], index.to_bytes())
            return await self._record(upload, names)
        except BaseException:
            intake.give_up(self._context, names)
            raise
        finally:
            self._long_line.end()
            if self._size >= memory.WORTH_BYTES:
                await memory.give_back()

    async def _upload(self, requests: Requests) -> uploads_repo.Row:
        first = await intake.next_frame(requests)
        if first is None or not first.HasField("header"):
            raise InvalidRequestError("The first frame of a part must be its header.")
        upload_id = first.header.upload_id
        upload = await self._context.db.read(
            lambda connection: uploads_repo.get(connection, upload_id, self._project_id)
        )
        # Told before the bytes are sent; what decides is the transaction after them.
        uploads_repo.refuse_ended(upload, self._context.now_ms() // 1000)
        return upload

    def _indexer(self, upload: uploads_repo.Row) -> PartIndexer | None:
        if upload.purpose != "batch":
            return None
        settings = self._context.settings
        return PartIndexer(
            max_lines=settings.max_batch_lines,
            max_line_bytes=settings.max_line_bytes,
            key=upload.hash_key.encode(),
        )

    async def _data(
        self, requests: Requests, upload: uploads_repo.Row, indexer: PartIndexer | None
    ) -> AsyncIterator[bytes]:
        while (request := await intake.next_frame(requests)) is not None:
            if request.HasField("footer"):
                return
            data = request.data
            self._size += len(data)
            if self._size > MAX_PART_BYTES:
                raise InvalidRequestError(
                    f"A part may have at most {MAX_PART_BYTES} bytes; send several.", param="data"
                )
            if self._size > upload.bytes:
                raise uploads_repo.too_much(upload)
            self._quota.require(self._size, param="data")
            await self._context.disk.require_room()
            self._digest.update(data)
            if indexer is not None:
                await self._long_line.feed(indexer, data)
            yield data
        raise InvalidRequestError("The part broke off before its end; send it again.")

    async def _record(self, upload: uploads_repo.Row, names: list[str]) -> uploads_pb2.UploadPart:
        part = uploads_repo.NewPart(
            id=f"part_{self._context.new_id()}",
            upload_id=upload.id,
            project_id=self._project_id,
            bytes=self._size,
            created_at=self._context.now_ms() // 1000,
            blob=names[0],
            index_blob=names[1] if len(names) > 1 else None,
            digest=self._digest.hexdigest(),
        )
        settings = self._context.settings

        def add(connection: sa.Connection) -> None:
            # What decides: others may have added to it since it was looked at.
            quota = quota_repo.quota(
                connection, part.project_id, settings.project_quota_bytes, part.created_at
            )
            quota.require(part.bytes, param="data")
            uploads_repo.add_part(connection, part, most_bytes=settings.max_upload_bytes)

        await self._context.db.write("part.add", add)
        return uploads_pb2.UploadPart(
            id=part.id, created_at=part.created_at, upload_id=part.upload_id
        )
