"""Results: the first durable one of a line wins, decided in the transaction that records it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from services.kit.wire.errors import InvalidRequestError, TooLargeError
from services.kit.wire.frames import RESULT_RECORD
from services.store.batches.seal import outcome_when_done, seal
from services.store.blobs import blobs_repo
from services.store.domain import results
from services.store.domain.results import Admission, Range, Records
from services.store.tables.core import batches, bit_blocks, chunks, segments
from services.store.work import attempts_repo, chunks_repo

Row = sa.Row[*tuple[Any, ...]]

INLINE_BYTES: Final = 256 * 1024
"""Payloads below this stay in their row; larger ones are blobs."""
_LINE_END: Final = ord("\n")
_SECOND_MS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Result lines of one attempt, ready to be recorded.

    `payload` is None when the bytes are durable as `blob`, which was announced before.
    """

    ticket: attempts_repo.Ticket
    records: Records
    payload: bytes | None
    blob: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a frame changed. `accepted`: lines whose first result it was.

    `sealed`: the batch takes no results, so nothing was recorded. `finished`: this frame held the
    last line, and the batch is sealed now.
    """

    accepted: int = 0
    sealed: bool = False
    finished: bool = False


def parse(records: bytes, payload: bytes, most_bytes: int) -> Records:
    """Return the records of a frame, checked against its payload.

    Raises:
        InvalidRequestError: a record points outside the payload or at something that is no line.
        TooLargeError: a line has more than `most_bytes`.
    """
    rows = _rows(records, most_bytes)
    ends = rows["offset"].astype(np.int64) + rows["length"]
    if not len(rows) or int(rows["length"].min()) < 1 or int(ends.max()) > len(payload):
        raise InvalidRequestError("A record of this frame points outside its payload.")
    if not (np.frombuffer(payload, np.uint8)[ends - 1] == _LINE_END).all():
        raise _no_line_end()
    return rows


class LongResult:
    """A frame whose payload comes in pieces; it holds one result line and nothing else."""

    def __init__(self, records: bytes, most_bytes: int) -> None:
        """Begin before the first piece.

        Raises:
            InvalidRequestError: it has not one record, which begins at 0.
            TooLargeError: the line has more than `most_bytes`.
        """
        self.records = _rows(records, most_bytes)
        if len(self.records) != 1 or int(self.records["offset"][0]):
            raise InvalidRequestError("A frame in pieces must hold one result line.")
        self._left = int(self.records["length"][0])

    def check(self, piece: bytes, *, more: bool) -> None:
        """Check the next piece.

        Raises:
            InvalidRequestError: the line ends before or after its end, or without a line feed.
        """
        self._left -= len(piece)
        if self._left < 0 or (not more and self._left):
            raise InvalidRequestError("The record of this frame does not fit its payload.")
        if not more and not piece.endswith(b"\n"):
            raise _no_line_end()


def _rows(records: bytes, most_bytes: int) -> Records:
    if len(records) % RESULT_RECORD.itemsize:
        raise InvalidRequestError("The records of this frame are cut off.")
    rows = np.frombuffer(records, RESULT_RECORD)
    if int(rows["length"].max(initial=0)) > most_bytes:
        raise TooLargeError(f"A result may have at most {most_bytes} bytes.")
    return rows


def _no_line_end() -> InvalidRequestError:
    return InvalidRequestError("A result of this frame does not end with a line feed.")


_BATCH: Final = (
    sa.select(
        batches.c.id,
        batches.c.project_id,
        batches.c.pool_id,
        batches.c.version,
        batches.c.status,
        batches.c.sealed_ms,
        batches.c.lines_total,
        batches.c.lines_done,
    )
    .where(batches.c.id == sa.bindparam("batch_id"))
    .with_for_update()
)
_CHUNK: Final = sa.select(
    chunks.c.lines, chunks.c.state, chunks.c.dispatch, chunks.c.lease_until_ms
).where(chunks.c.id == sa.bindparam("chunk_id"))
_BITS: Final = (
    sa.select(bit_blocks.c.block, bit_blocks.c.bits)
    .where(
        bit_blocks.c.batch_id == sa.bindparam("batch_id"),
        bit_blocks.c.block.in_(sa.bindparam("blocks", expanding=True)),
    )
    .order_by(bit_blocks.c.block)
)
_LOCKED_BITS: Final = _BITS.with_for_update()
_CHANGE_BITS: Final = (
    bit_blocks.update()
    .where(
        bit_blocks.c.batch_id == sa.bindparam("of_batch"),
        bit_blocks.c.block == sa.bindparam("of_block"),
    )
    .values(bits=sa.bindparam("new_bits"))
)
_NEW_BITS: Final = bit_blocks.insert()
_NEW_SEGMENT: Final = segments.insert().inline()
_COUNT: Final = (
    batches.update()
    .where(batches.c.id == sa.bindparam("of_batch"))
    .values(
        version=batches.c.version + 1,
        lines_done=batches.c.lines_done + sa.bindparam("more_lines"),
        **{name: batches.c[name] + sa.bindparam(f"more_{name}") for name in results.COUNTED},
    )
)


def blocks_of_ranges(ranges: Iterable[Range]) -> set[int]:
    """Return the numbers of the blocks that hold these lines."""
    return {
        block
        for first, count in ranges
        for block in range(
            first // results.BLOCK_LINES, (first + count - 1) // results.BLOCK_LINES + 1
        )
    }


def bits_of(
    connection: sa.Connection, batch_id: str, numbers: Iterable[int], *, lock: bool = False
) -> dict[int, bytes]:
    """Return these bit blocks of a batch, as far as they exist; locked ascending when asked."""
    query = _LOCKED_BITS if lock else _BITS
    rows = connection.execute(query, {"batch_id": batch_id, "blocks": sorted(numbers)})
    return {row.block: row.bits for row in rows}


def remaining(
    connection: sa.Connection, batch_id: str, ranges: Sequence[Range], *, lock: bool = False
) -> list[Range]:
    """Return the parts of these lines that have no result yet."""
    blocks = bits_of(connection, batch_id, blocks_of_ranges(ranges), lock=lock)
    return results.remaining_ranges(blocks, ranges)


def record(connection: sa.Connection, frame: Frame, *, now_ms: int, lease_ms: int) -> Recorded:
    """Record the results of a frame that are the first of their lines.

    Raises:
        InvalidRequestError: a line beyond the batch.
        UnavailableError: the frame's blob was swept; send the frame again.
    """
    ticket = frame.ticket
    batch = connection.execute(_BATCH, {"batch_id": ticket.batch_id}).first()
    if batch is None or batch.sealed_ms is not None:
        _drop_blob(connection, frame, now_ms)
        return Recorded(sealed=True)
    chunk = connection.execute(_CHUNK, {"chunk_id": ticket.chunk_id}).one()
    lines = chunks_repo.unpack_ranges(chunk.lines)
    touched = blocks_of_ranges(lines).union(results.blocks_of(frame.records["line"]))
    blocks = bits_of(connection, batch.id, touched, lock=True)
    try:
        admission = results.admit_results(blocks, frame.records, total=batch.lines_total)
    except ValueError as error:
        raise InvalidRequestError(f"A result of no line of the batch: {error}.") from error
    if admission.tally.lines:
        _write(connection, frame, blocks, admission, version=batch.version + 1)
        blocks.update(admission.blocks)
    else:
        _drop_blob(connection, frame, now_ms)
    # Also where nothing won: the lines may have got their results through another chunk.
    if chunk.state == chunks_repo.DONE or results.remaining_ranges(blocks, lines):
        _keep_alive(connection, ticket, chunk, now_ms, lease_ms)
    else:
        chunks_repo.finish(connection, ticket.chunk_id)
        attempts_repo.close_of_chunk(
            connection, ticket.chunk_id, attempts_repo.Outcome.DONE, now_ms
        )
    finished = batch.lines_done + admission.tally.lines == batch.lines_total and seal(
        connection, batch, outcome_when_done(batch.status), now_ms
    )
    return Recorded(accepted=admission.tally.lines, finished=finished)


def _drop_blob(connection: sa.Connection, frame: Frame, now_ms: int) -> None:
    """Have a blob that nothing will name deleted, also where its row was swept before it was."""
    if frame.blob is not None:
        blobs_repo.doom_announced(connection, [frame.blob], now_ms)


def _write(
    connection: sa.Connection,
    frame: Frame,
    blocks: dict[int, bytes],
    admission: Admission,
    *,
    version: int,
) -> None:
    """Write bits, segment and counts of a frame's winners; `version` is the batch's afterwards."""
    _write_bits(connection, frame.ticket, blocks, admission)
    batch_id, project_id = frame.ticket.batch_id, frame.ticket.project_id
    winners = frame.records[admission.winners]
    if frame.blob is not None:
        blobs_repo.make_live(connection, [frame.blob])
    connection.execute(
        _NEW_SEGMENT,
        {
            "batch_id": batch_id,
            "project_id": project_id,
            "version": version,
            "first_line": int(winners["line"].min()),
            "last_line": int(winners["line"].max()),
            "records": winners.tobytes(),
            "payload": frame.payload,
            "blob": frame.blob,
        },
    )
    tally = admission.tally
    connection.execute(
        _COUNT,
        {
            "of_batch": batch_id,
            "more_lines": tally.lines,
            **{f"more_{name}": getattr(tally, name) for name in results.COUNTED},
        },
    )


def _write_bits(
    connection: sa.Connection,
    ticket: attempts_repo.Ticket,
    blocks: dict[int, bytes],
    admission: Admission,
) -> None:
    old = [number for number in admission.blocks if number in blocks]
    new = [number for number in admission.blocks if number not in blocks]
    if old:
        connection.execute(
            _CHANGE_BITS,
            [
                {"of_batch": ticket.batch_id, "of_block": each, "new_bits": admission.blocks[each]}
                for each in old
            ],
        )
    if new:
        connection.execute(
            _NEW_BITS,
            [
                {
                    "batch_id": ticket.batch_id,
                    "block": each,
                    "project_id": ticket.project_id,
                    "bits": admission.blocks[each],
                }
                for each in new
            ],
        )


def _keep_alive(
    connection: sa.Connection,
    ticket: attempts_repo.Ticket,
    chunk: Row,
    now_ms: int,
    lease_ms: int,
) -> None:
    """Move the lease as a beat does, at most once a second: the beat comes each second anyway."""
    if (
        ticket.token
        and chunk.dispatch == ticket.dispatch
        and chunk.lease_until_ms is not None
        and now_ms < chunk.lease_until_ms < now_ms + lease_ms - _SECOND_MS
    ):
        attempts_repo.extend(connection, [ticket], now_ms + lease_ms)
