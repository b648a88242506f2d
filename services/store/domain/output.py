"""End files: in which order result lines stand, and the lines that the store writes itself.

Result lines lie in segments, in the order in which they were done. The output file takes those of
status 2xx, the error file all others; both keep the order of the input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from services.kit.wire.frames import FAILED_FLAG, NEVER_RAN_FLAG, RESULT_RECORD
from services.kit.wire.result_line import BATCH_CANCELLED, BATCH_EXPIRED, no_response_line

PLACE: Final = np.dtype(
    [("line", "<u4"), ("segment", "<u4"), ("offset", "<u4"), ("length", "<u4"), ("flags", "<u4")]
)
"""Where a winner's line lies: ordinal in the batch, number of the segment (the caller's own
numbering), bytes in that segment's payload (line end included), flags of its result record."""

RUN: Final = np.dtype([("segment", "<u4"), ("offset", "<u4"), ("length", "<u4")])
"""A stretch of a segment's payload that is copied as it is."""

Records = npt.NDArray[np.void]

# Counted as neither completed nor failed: lines that no engine was given.
_NEVER_RAN_CODES: Final = frozenset({BATCH_CANCELLED, BATCH_EXPIRED})


@dataclass(frozen=True, slots=True)
class EndRuns:
    """What to copy, in order, into the output and the error file: rows of `RUN`."""

    output: Records
    error: Records


def places(records: Records, segment: int) -> Records:
    """Rows of `PLACE` for the winners (rows of `RESULT_RECORD`) of one segment."""
    rows = np.zeros(len(records), PLACE)
    rows["segment"] = segment
    for column in ("line", "offset", "length", "flags"):
        rows[column] = records[column]
    return rows


def merge_order(winners: Records) -> EndRuns:
    """The order of both files for these winners (rows of `PLACE`, any order, any segments).

    Lines of the same segment that follow one another there too become one run. Raises ValueError
    when a line occurs twice.
    """
    ordered = winners[np.argsort(winners["line"], kind="stable")]
    lines = ordered["line"]
    if np.any(lines[1:] == lines[:-1]):
        raise ValueError("a line has two winners")
    refused = (ordered["flags"] & (FAILED_FLAG | NEVER_RAN_FLAG)) != 0
    return EndRuns(_runs(ordered[~refused]), _runs(ordered[refused]))


def _runs(ordered: Records) -> Records:
    if not len(ordered):
        return np.zeros(0, RUN)
    ends = ordered["offset"].astype(np.int64) + ordered["length"]
    cut = np.concatenate(
        (
            [True],
            (ordered["segment"][1:] != ordered["segment"][:-1])
            | (ordered["offset"][1:] != ends[:-1]),
        )
    )
    starts = np.flatnonzero(cut)
    runs = np.zeros(starts.size, RUN)
    runs["segment"] = ordered["segment"][starts]
    runs["offset"] = ordered["offset"][starts]
    runs["length"] = np.add.reduceat(ordered["length"].astype(np.int64), starts)
    return runs


def unanswered_frame(
    batch_id: str, lines: Sequence[int], custom_ids_json: Sequence[bytes | None], code: str
) -> tuple[Records, bytes]:
    """Result records and payload, as an executor would send them, for lines without an answer.

    `custom_ids_json`: the JSON strings of these lines (`result_line.custom_id_json`), None
    where it is not known any more.
    `code`: one of the `MESSAGES` there (KeyError otherwise); expired and cancelled lines count as
    never run, the others as failed. The same arguments give the same bytes.
    """
    texts = [
        no_response_line(batch_id, line, custom_id, code)
        for line, custom_id in zip(lines, custom_ids_json, strict=True)
    ]
    records = np.zeros(len(texts), RESULT_RECORD)
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    records["line"] = lines
    records["length"] = lengths
    records["offset"] = np.cumsum(lengths) - lengths
    records["flags"] = NEVER_RAN_FLAG if code in _NEVER_RAN_CODES else FAILED_FLAG
    return records, b"".join(texts)
