"""Pages of a batch's events, read from SQL, segments and end files; nothing is kept between pages.

While a batch runs, and for a while after its end, lines come from its segments in order of commit.
A stream that begins after the end, or goes on long after it, reads the end files instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from services.kit.errors import (
    InvalidRequestError,
    LostError,
    NightshiftError,
    NotFoundError,
    UnavailableError,
)
from services.kit.frames import RESULT_RECORD
from services.kit.ids import ProjectId
from services.kit.log import get_logger
from services.kit.result_line import never_ran
from services.store import batches_repo, events_repo, files_repo, losses, pools_repo
from services.store.blobs.base import BlobDamagedError, BlobMissingError, Blobs
from services.store.context import Context
from services.store.domain import event_cursor
from services.store.domain.event_cursor import START, Cursor, InFile, Live, Part
from services.store.domain.result_lines import is_line
from services.store.domain.results import Records
from services.store.domain.state import TERMINAL
from services.store.domain.waiting import NOTHING, Explanation
from services.store.input_reader import read_span

_log = get_logger(__name__)

Row = sa.Row[Any]

PAGE_BYTES: Final = 256 * 1024
"""Lines of a page; a longer line is told in pieces of this size."""

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

    async def page(self, watch: Watch) -> Page:
        """Return what there is to tell now, perhaps nothing; raises as `_page` does."""
        page = await self._page(watch)
        if not page.state:
            return page
        now_ms = self._context.now_ms()
        (explanation,) = await self._context.db.read(
            lambda connection: pools_repo.explanations(connection, [page.batch], now_ms)
        )
        return replace(page, explanation=explanation)

    async def _page(self, watch: Watch) -> Page:
        """Return the same without an explanation.

        Raises:
            NotFoundError: unknown, or another project's.
            InvalidRequestError: the batch has no such event.
            UnavailableError: what was to be read is just being dropped; ask again.
            LostError: it is lost.
        """
        cursor = _cursor_of(watch.after)
        batch, segments = await self._context.db.read(
            lambda connection: self._look(connection, watch, cursor)
        )
        if not watch.include_results:
            told = cursor.told if isinstance(cursor, Live) else batch.version
            news = told < batch.version or _has_ended(batch)
            return Page(batch=batch, state=news, next=str(batch.version))
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
        if not await self._context.db.read(lambda connection: losses.is_lost(connection, missing)):
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
    ) -> tuple[Row, "_Segments"]:
        """Read the batch and the segments to come on one snapshot: no line falls between."""
        batch = batches_repo.get(connection, watch.batch_id, watch.project_id)
        if isinstance(cursor, InFile):
            if not _has_ended(batch):
                raise _no_such_event(watch.after)
            return batch, _Segments()
        if cursor.told > batch.version:
            raise _no_such_event(watch.after)
        if not watch.include_results or self._is_gone(batch, cursor):
            return batch, _Segments()
        return batch, _load(connection, batch, cursor)

    def _is_gone(self, batch: Row, cursor: Live) -> bool:
        """Tell whether what follows stands, or will stand any moment, in the end files only."""
        if not _has_ended(batch) or cursor.told >= batch.version:
            return False
        return cursor == START or batch.keep_until_ms - _EARLY_MS <= self._context.now_ms()

    async def _live(self, batch: Row, segments: "_Segments", cursor: Live) -> Page:
        told = await _compose(segments, cursor, self._context.blobs)
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
        raise _no_such_event(after) from None


def _no_such_event(after: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"This batch has no event '{after[:100]}'. Give the id of the last event that you had, or "
        "none to begin at the first.",
        code="invalid_value",
        param="after",
    )


def _has_ended(batch: Row) -> bool:
    return batch.status in TERMINAL


def _some_never_ran(batch: Row) -> bool:
    return bool(batch.lines_total > batch.completed + batch.failed)


# --- from segments -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Segment:
    version: int
    records: Records
    payload: bytes | None
    blob: str | None


@dataclass(frozen=True, slots=True)
class _Segments:
    """Those to come, as many as fill a page; `last` where no further one follows."""

    rows: Sequence[_Segment] = ()
    last: bool = True


def _load(connection: sa.Connection, batch: Row, cursor: Live) -> _Segments:
    rows = events_repo.segments_after(connection, batch, cursor)
    chosen: list[tuple[Row, Records]] = []
    size = 0
    for row in rows:
        records = np.frombuffer(row.records, RESULT_RECORD)
        told = 0
        if row.version == cursor.version:
            told = cursor.lines
            if not _is_within(records, cursor):
                raise _no_such_event(str(cursor))
        chosen.append((row, records))
        size += int(records["length"][told:].sum(dtype=np.int64))
        if size >= PAGE_BYTES:
            break
    payloads = events_repo.payloads(connection, [row.id for row, _ in chosen if row.blob is None])
    return _Segments(
        [_Segment(row.version, records, payloads.get(row.id), row.blob) for row, records in chosen],
        last=len(chosen) == len(rows) < events_repo.SEGMENTS,
    )


def _is_within(records: Records, cursor: Live) -> bool:
    """Whether a commit has the line, and that line the byte, which a cursor goes on at."""
    if cursor.lines >= len(records):
        return cursor.lines == len(records) and not cursor.offset
    return cursor.offset < int(records["length"][cursor.lines])


@dataclass(slots=True)
class _Told:
    """Lines of one page. `all`: nothing is left; else the next page begins `at`."""

    at: Live
    all: bool = False
    lines: list[bytes] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)


async def _compose(segments: _Segments, cursor: Live, blobs: Blobs) -> _Told:
    told = _Told(cursor)
    room = PAGE_BYTES
    for segment in segments.rows:
        if segment.version != told.at.version:
            told.at = Live(segment.version)
        source = _Source(segment, blobs)
        places = segment.records[["offset", "length"]][told.at.lines :].tolist()
        for start, length in places:
            begun = told.at.offset
            left = length - begun
            if left > room and told.lines:
                return told
            size = min(left, PAGE_BYTES)
            told.lines.append(await source.line(start + begun, size, begun=begun, left=left))
            if size < left:
                told.at = Live(segment.version, told.at.lines, begun + size)
                return told
            told.at = Live(segment.version, told.at.lines + 1)
            told.ids.append(str(told.at))
            room -= size
        told.at = Live(segment.version + 1)
    told.all = segments.last
    return told


class _Source:
    """The bytes of a segment's payload; of a blob, a window that moves on with the lines."""

    def __init__(self, segment: _Segment, blobs: Blobs) -> None:
        self._blob = segment.blob
        self._blobs = blobs
        self._start = 0
        self._window = segment.payload or b""
        ends = segment.records["offset"].astype(np.int64) + segment.records["length"]
        self._end = int(ends.max())

    async def line(self, offset: int, length: int, *, begun: int, left: int) -> bytes:
        """Read `length` bytes of a line of which `begun` were read before, and `left` are left.

        Raises:
            BlobMissingError: there are none, or they are not of a line.
        """
        piece = await self._read(offset, length)
        if self._blob is not None and not is_line(
            None if begun else piece, piece if length == left else None
        ):
            raise BlobDamagedError(self._blob)
        return piece

    async def _read(self, offset: int, length: int) -> bytes:
        at = offset - self._start
        if self._blob is not None and not 0 <= at <= len(self._window) - length:
            wanted = min(max(length, PAGE_BYTES), self._end - offset)
            self._window = await self._blobs.read(self._blob, offset, wanted)
            self._start, at = offset, 0
            if len(self._window) < length:
                raise BlobMissingError(self._blob)
        return self._window[at : at + length]


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
