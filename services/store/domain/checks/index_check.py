"""Whether a line index is that of its file."""

from typing import Final

import numpy as np
import numpy.typing as npt

from services.store.domain.index.line_index import (
    ANOTHER,
    BOM,
    CUSTOM_ID_OK,
    TOO_LONG,
    LineIndex,
    LineIndexer,
    Records,
)

SAMPLES: Final = 16
"""Lines of a file that are read and looked at; the first and the last are among them."""
NEIGHBOUR_BYTES: Final = 3
"""What is read before a line, and behind it, to see that it begins and ends there."""
_U64: Final = np.uint64


def table_fault(index: LineIndex, size: int) -> str | None:
    """Return what is wrong with an index of a file of `size` bytes, its content not looked at."""
    kept = len(index.records)
    if index.lines < kept:
        return f"counts {index.lines} lines and records {kept}"
    if not kept:
        return None
    starts = index.offsets()
    ends = starts + index.records["length"].astype(_U64)
    if int(ends.max()) > size:
        beyond = int(np.flatnonzero(ends > size)[0])
        return f"puts line {beyond} at bytes {int(starts[beyond])}-{int(ends[beyond])} of {size}"
    overlaps = np.flatnonzero(starts[1:] <= ends[:-1])
    if overlaps.size:
        return f"puts line {int(overlaps[0]) + 1} inside the line before it"
    for column, names in (("url", index.urls), ("model", index.models)):
        ids = index.records[column]
        unknown = np.flatnonzero((ids != ANOTHER) & (ids >= len(names)))
        if unknown.size:
            return f"gives line {int(unknown[0])} a {column} that it does not name"
    return None


def samples(index: LineIndex) -> list[int]:
    """Return the ordinals of a few lines all over the file."""
    kept = len(index.records)
    if kept <= SAMPLES:
        return list(range(kept))
    places: list[int] = np.linspace(0, kept - 1, SAMPLES).astype(np.int64).tolist()
    return places


def line_fault(
    index: LineIndex, ordinal: int, *, before: bytes, line: bytes, after: bytes
) -> str | None:
    """Return in what a line of the file is not what the index says of it.

    `before` and `after`: up to `NEIGHBOUR_BYTES` that lie there, fewer at the file's ends only.
    """
    record = index.records[ordinal]
    if len(line) != int(record["length"]):
        return f"line {ordinal} lies beyond the file's end"
    begins = not before or before.endswith(b"\n") or before == BOM
    ends = not after or after.startswith((b"\n", b"\r\n")) or after == b"\r"
    if not (begins and ends) or b"\n" in line:
        return f"line {ordinal} does not begin and end where it says"
    if record["flags"] & TOO_LONG:
        return None
    indexer = LineIndexer(max_lines=1, max_line_bytes=max(1, len(line)), key=b"")
    # A line that is not the file's first keeps the mark that it begins with.
    indexer.feed(b"\n")
    indexer.feed(line)
    found = indexer.finish()
    if not len(found.records) or found.records[0]["flags"] != record["flags"]:
        return f"line {ordinal} holds something else than it says"
    for column in ("url", "model"):
        said, is_so = _name(index, record, column), _name(found, found.records[0], column)
        # Of a file with very many names the index leaves some out.
        if said is not None and said != is_so:
            return f"line {ordinal} has another {column} than it says"
    return None


def _name(index: LineIndex, record: Records, column: str) -> str | None:
    number = int(record[column])
    names = index.urls if column == "url" else index.models
    return None if number == ANOTHER else names[number]


def limits_of(index: LineIndex, max_line_bytes: int) -> tuple[int, int]:
    """Return `max_lines` and `max_line_bytes` under which an index can be made again.

    They may have been others when it was made: `max_line_bytes` is the present one, which is kept
    where it fits.
    """
    lengths = index.records["length"]
    too_long = (index.records["flags"] & TOO_LONG) != 0
    least = int(lengths[~too_long].max(initial=1))
    # Of such a line, a byte-order mark and a CR were counted too.
    most = int(lengths[too_long].min(initial=2**32 - 1)) - len(BOM) - 2
    fitting = min(max(least, max_line_bytes), max(least, most))
    return (len(index.records) - 1 if index.truncated else max(1, index.lines)), fitting


def difference(said: LineIndex, fresh: LineIndex) -> str | None:
    """Return the first thing in which an index is not the one made of the file anew.

    Hashes of custom ids have a secret of their own in each: only which of them are equal counts.
    """
    if said.lines != fresh.lines:
        return f"counts {said.lines} lines instead of {fresh.lines}"
    if len(said.records) != len(fresh.records):
        return f"records {len(said.records)} lines instead of {len(fresh.records)}"
    for column in ("offset_low", "offset_high", "length", "flags", "url", "model"):
        different = np.flatnonzero(said.records[column] != fresh.records[column])
        if different.size:
            return f"has a wrong {column.partition('_')[0]} for line {int(different[0])}"
    if (said.urls, said.models) != (fresh.urls, fresh.models):
        return "names other urls or models than the file"
    if said.breaks.tobytes() != fresh.breaks.tobytes():
        return "has other blank lines than the file"
    different = np.flatnonzero(_first_alike(said) != _first_alike(fresh))
    if different.size:
        return f"has a wrong custom_id for line {int(different[0])}"
    return None


def _first_alike(index: LineIndex) -> npt.NDArray[np.int64]:
    """For each line with a custom id: the first of these with an equal one."""
    hashes = index.records["hash"][(index.records["flags"] & CUSTOM_ID_OK) != 0]
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    alike: npt.NDArray[np.int64] = first[inverse]
    return alike
