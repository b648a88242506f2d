"""Pages of a batch's events, read from SQL, segments and end files; kept for a moment for others.

While a batch runs, and for a while after its end, lines come from its segments in order of commit.
A stream that begins after the end, or goes on long after it, reads the end files instead.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from services.kit.process.log import get_logger
from services.kit.wire.errors import LostError, NightshiftError, NotFoundError, UnavailableError
from services.kit.wire.ids import ProjectId
from services.kit.wire.result_line import never_ran
from services.store.batches import batches_repo, pools_repo
from services.store.blobs.base import BlobMissingError
from services.store.context import Context
from services.store.domain import event_cursor
from services.store.domain.event_cursor import START, Cursor, InFile, Live, Part
from services.store.domain.explanation import NOTHING, Explanation
from services.store.domain.state import TERMINAL
from services.store.events import events_repo
from services.store.events.event_segments import PAGE_BYTES, Segments, compose, load, no_such_event
from services.store.events.shared_reads import SharedReads
from services.store.files import files_repo
from services.store.inputs.input_reader import read_span
from services.store.work import lost_content

_log = get_logger(__name__)

Row = sa.Row[Any]

# Clearing may begin early by another store's clock.
_EARLY_MS: Final = 60_000
_LINE_END: Final = ord("\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is asked for; see `WatchBatchRequest`."""

    batch_id: str
    project_id: ProjectId
    include_results: bool
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What comes next, in this order: a reset, lines, the state.

    Attributes:
        batch: its row, to which `state` refers.
        explanation: what it waits for, where the state is told.
        reset: all lines are told again, from the place of this id on.
        lines: result lines with their line feeds; the last may go on in the next page.
        ids: of each line that ends in `lines`.
        state: whether the batch as it stands is told.
        next: where the next page begins.
    """

    batch: Row
    explanation: Explanation = NOTHING
    reset: str = ""
    lines: bytes = b""
    ids: Sequence[str] = ()
    state: bool = False
    next: str

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.reset or self.lines or self.state)

    @property
    def ended(self) -> bool:
        """Whether this page tells the end."""
        return self.state and _has_ended(self.batch)


class EventReader:
    """Reads pages."""

    def __init__(self, context: Context) -> None:
        """Read batches of `context`."""
        self._context = context
        self._reads = SharedReads()

    async def page(self, watch: Watch, since: float) -> Page:
        """Return what there is to tell, perhaps nothing, as it stands at the loop's time `since`.

        All who ask for the same share a read; so do all who ask for a batch without results.

        Raises:
            NotFoundError: unknown, or another project's.
            InvalidRequestError: the batch has no such event.
            UnavailableError: what was to be read is just being dropped; ask again.
            LostError: it is lost.
        """
        if watch.include_results:
            page = await self._reads.get(watch, since, lambda: self._results(watch))
        else:
            page = await self._state(watch, since)
        if not page.state:
            return page
        batch = page.batch
        explanation = await self._reads.get(
            (batch.id, batch.version), since, lambda: self._explain(batch)
        )
        return replace(page, explanation=explanation)

    async def _explain(self, batch: Row) -> Explanation:
        now_ms = self._context.now_ms()
        (explanation,) = await self._context.db.read(
            lambda connection: pools_repo.explanations(connection, [batch], now_ms)
        )
        return explanation

    async def _state(self, watch: Watch, since: float) -> Page:
        cursor = _cursor_of(watch.after)
        batch = await self._batch(watch, since)
        if isinstance(cursor, Live) and cursor.told > batch.version:
            # The read is a moment old, and more was told since.
            batch = await self._batch(watch, asyncio.get_running_loop().time())
        _check_cursor(batch, cursor, watch.after)
        told = cursor.told if isinstance(cursor, Live) else batch.version
        news = told < batch.version or _has_ended(batch)
        return Page(batch=batch, state=news, next=str(batch.version))

    async def _batch(self, watch: Watch, since: float) -> Row:
        key = watch.batch_id, watch.project_id
        return await self._reads.get(
            key,
            since,
            lambda: self._context.db.read(lambda connection: batches_repo.get(connection, *key)),
        )

    async def _results(self, watch: Watch) -> Page:
        """Return a page of results, without an explanation."""
        cursor = _cursor_of(watch.after)
        batch, segments = await self._context.db.read(
            lambda connection: self._look(connection, watch, cursor)
        )
        try:
            if isinstance(cursor, InFile):
                return await self._from_file(batch, cursor)
            if self._is_gone(batch, cursor):
                if cursor == START:
                    return await self._from_file(batch, InFile("output"))
                first = str(InFile("output"))
                return Page(batch=batch, reset=first, next=first)
            if not batch.keep_until_ms and not _has_ended(batch):
                await self._context.db.write(
                    "stream.keep", lambda connection: events_repo.keep_results(connection, batch.id)
                )
            return await self._live(batch, segments, cursor)
        except BlobMissingError as error:
            raise await self._gone(batch, error) from None

    async def _gone(self, batch: Row, missing: BlobMissingError) -> NightshiftError:
        """Return what is told of results that were not found."""
        if not await self._context.db.read(
            lambda connection: lost_content.is_lost(connection, missing)
        ):
            return UnavailableError(
                "These results are being moved; try again.", retry_after_seconds=1
            )
        _log.error("results_missing", batch=batch.id, blob=missing.name)
        return LostError(
            f"Results of batch {batch.id} are missing from the server's storage or damaged, so "
            "that this stream cannot go on. Asking again does not help until the operator has put "
            "them back, which `nightshift doctor --check` helps with; follow the batch without "
            "results, or wait for its end files.",
            code="results_lost",
        )

    def _look(
        self, connection: sa.Connection, watch: Watch, cursor: Cursor
    ) -> tuple[Row, Segments]:
        """Read the batch and the segments to come on one snapshot: no line falls between."""
        batch = batches_repo.get(connection, watch.batch_id, watch.project_id)
        _check_cursor(batch, cursor, watch.after)
        if isinstance(cursor, InFile) or self._is_gone(batch, cursor):
            return batch, Segments()
        return batch, load(connection, batch, cursor)

    def _is_gone(self, batch: Row, cursor: Live) -> bool:
        """Tell whether what follows stands, or will stand any moment, in the end files only."""
        if not _has_ended(batch) or cursor.told >= batch.version:
            return False
        return cursor == START or batch.keep_until_ms - _EARLY_MS <= self._context.now_ms()

    async def _live(self, batch: Row, segments: Segments, cursor: Live) -> Page:
        told = await compose(segments, cursor, self._context.blobs)
        lines, ids = b"".join(told.lines), told.ids
        if not told.all:
            return Page(batch=batch, lines=lines, ids=ids, next=str(told.at))
        if _has_ended(batch) and _some_never_ran(batch) and cursor.told < batch.version:
            return Page(batch=batch, lines=lines, ids=ids, next=str(InFile("never_ran")))
        news = cursor.told < batch.version or _has_ended(batch)
        return Page(batch=batch, lines=lines, ids=ids, state=news, next=str(batch.version))

    async def _from_file(self, batch: Row, cursor: InFile) -> Page:
        offset = cursor.offset
        part: Part | None = cursor.part
        while part is not None:
            file = await self._end_file(batch, part)
            if file is None or offset >= file.bytes:
                part, offset = ("error", 0) if part == "output" else (None, 0)
                continue
            size = min(PAGE_BYTES, file.bytes - offset)
            data = await read_span(self._context.blobs, file.parts, offset, size)
            lines, ends = _whole_lines(data)
            ids = [str(InFile(part, offset + end)) for end in ends]
            if part == "never_ran":
                lines, ids = _only_never_ran(lines, ids) if ends else (b"", [])
            after = offset + (ends[-1] if ends else len(data))
            return Page(batch=batch, lines=lines, ids=ids, next=str(InFile(part, after)))
        return Page(batch=batch, state=True, next=str(batch.version))

    async def _end_file(self, batch: Row, part: Part) -> Row | None:
        """The row of an end file; None where there is none, or where its owner deleted it."""
        file_id = batch.output_file_id if part == "output" else batch.error_file_id
        if file_id is None:
            return None
        project_id = ProjectId(batch.project_id)
        now_at = self._context.now_ms() // 1000
        try:
            return await self._context.db.read(
                lambda connection: files_repo.get(connection, file_id, project_id, now_at)
            )
        except NotFoundError:
            return None


def _cursor_of(after: str) -> Cursor:
    try:
        return event_cursor.parse(after)
    except event_cursor.CursorError:
        raise no_such_event(after) from None


def _check_cursor(batch: Row, cursor: Cursor, after: str) -> None:
    """Refuse a place that the batch does not have yet."""
    has_it = _has_ended(batch) if isinstance(cursor, InFile) else cursor.told <= batch.version
    if not has_it:
        raise no_such_event(after)


def _has_ended(batch: Row) -> bool:
    return batch.status in TERMINAL


def _some_never_ran(batch: Row) -> bool:
    return bool(batch.lines_total > batch.completed + batch.failed)


# --- from end files ------------------------------------------------------------------------------


def _whole_lines(data: bytes) -> tuple[bytes, list[int]]:
    """The lines that end in `data`, and where; all of it where none does."""
    ends = (np.flatnonzero(np.frombuffer(data, np.uint8) == _LINE_END) + 1).tolist()
    return data[: ends[-1]] if ends else data, ends


def _only_never_ran(lines: bytes, ids: Sequence[str]) -> tuple[bytes, list[str]]:
    kept = [
        (line, each)
        for line, each in zip(lines.splitlines(keepends=True), ids, strict=True)
        if never_ran(line)
    ]
    return b"".join(line for line, _ in kept), [each for _, each in kept]
