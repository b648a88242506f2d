"""Makes lost or damaged line indexes again from the input, which all in them is derived from."""

import asyncio
from typing import Any, Final

import sqlalchemy as sa

from services.kit.process.log import get_logger
from services.kit.wire.errors import UnavailableError
from services.kit.wire.ids import ProjectId
from services.store import memory
from services.store.blobs import blobs_repo
from services.store.blobs.base import BlobDamagedError, BlobMissingError
from services.store.context import Context
from services.store.domain.index.line_index import LineIndex, LineIndexer
from services.store.files import intake
from services.store.inputs.input_reader import read_span
from services.store.tables.core import OPEN_WHERE, batches, files

_log = get_logger(__name__)

Row = sa.Row[*tuple[Any, ...]]

_READ_BYTES: Final = 4 * 1024 * 1024


class IndexMaker:
    """Makes one at a time, since each takes the memory of an upload."""

    def __init__(self, context: Context) -> None:
        """Make indexes of the files of `context`."""
        self._context = context
        self._one = asyncio.Lock()

    async def make_again(self, name: str) -> LineIndex:
        """Return the index whose blob `name` is lost; it is stored in a blob of a new name.

        Raises:
            BlobMissingError: no file has that index any more, or the input itself is lost or has
                become another text, of which batches that run do not know.
            UnavailableError: the input cannot be read now.
        """
        async with self._one:
            file = await self._context.db.read(lambda connection: _file_of(connection, name))
            if file is None:
                raise BlobMissingError(name)
            index = await self._indexed(file)
            try:
                await self._store(file, index)
            except UnavailableError as error:
                # The disk is full, say: this process has it, and the next one makes it again.
                _log.warning("index_not_stored", file=file.id, error=error.message)
            if file.bytes >= memory.WORTH_BYTES:
                await memory.give_back()
        _log.warning("index_made_again", file=file.id, blob=name)
        return index

    async def _indexed(self, file: Row) -> LineIndex:
        settings = self._context.settings
        indexer = LineIndexer(
            max_lines=max(settings.max_batch_lines, file.lines or 0),
            max_line_bytes=settings.max_line_bytes,
            key=self._context.new_id().encode(),
        )
        for offset in range(0, file.bytes, _READ_BYTES):
            size = min(_READ_BYTES, file.bytes - offset)
            data = await read_span(self._context.blobs, file.parts, offset, size)
            await asyncio.to_thread(indexer.feed, data)
        index = await asyncio.to_thread(indexer.finish)
        if file.lines not in (None, 0, index.lines):
            # Kept, it would be taken for that of the true input once that is put back.
            raise BlobDamagedError(file.parts[0][0])
        return index

    async def _store(self, file: Row, index: LineIndex) -> None:
        name = await intake.announce(self._context, ProjectId(file.project_id), "index")
        try:
            pieces = intake.in_turn(index.pieces())
            await self._context.blobs.put("index.write_again", name, pieces)
            stored = await self._context.db.write(
                "index.replace", lambda connection: _replace(connection, file, name)
            )
        except BaseException:
            intake.give_up(self._context, [name])
            raise
        if not stored:
            # Another store was first, or the file has gone.
            intake.give_up(self._context, [name])
        self._context.wake("sweeper")


def _file_of(connection: sa.Connection, name: str) -> Row | None:
    """The file with this line index, and the lines that its open batches know of."""
    lines = (
        sa.select(sa.func.max(batches.c.lines_total))
        .where(sa.text(OPEN_WHERE), batches.c.index_blob == name)
        .scalar_subquery()
    )
    return connection.execute(
        sa.select(files.c.id, files.c.project_id, files.c.parts, files.c.bytes, files.c.index_blob)
        .add_columns(lines.label("lines"))
        .where(files.c.index_blob == name, files.c.purged_at.is_(None))
    ).first()


def _replace(connection: sa.Connection, file: Row, name: str) -> bool:
    """Name the new blob in place of the old one, wherever that is still named."""
    replaced = connection.execute(
        files.update()
        .where(
            files.c.id == file.id,
            files.c.index_blob == file.index_blob,
            files.c.purged_at.is_(None),
        )
        .values(index_blob=name)
    )
    if replaced.rowcount != 1:
        return False
    connection.execute(
        batches.update()
        .where(sa.text(OPEN_WHERE), batches.c.index_blob == file.index_blob)
        .values(index_blob=name)
    )
    blobs_repo.make_live(connection, [name])
    blobs_repo.doom(connection, [file.index_blob])
    return True
