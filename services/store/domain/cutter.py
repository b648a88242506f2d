"""Which lines go into the next chunk: those of one model, in the order of the file.

A file of several models is cut for each by itself, behind a cursor of its own, so that every line
is in exactly one chunk whatever the order in which pools take them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.store.domain.results import Range, pack

Records = npt.NDArray[np.void]
#: Rows of `services.store.domain.index.line_index.RECORD`.

_BLOCK: Final = 65_536
"""Lines looked at in one step: what a file holds of other models is passed over in such steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLines:
    """What a file holds of one model.

    Attributes:
        name: as the lines give it.
        model_id: its id in the line index.
        lines: how many.
        first: the first of them, an ordinal.
    """

    name: str
    model_id: int
    lines: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Lines for one chunk.

    Attributes:
        ranges: of ordinals, ascending.
        lines: how many, at least one.
        bytes: their input.
        next_line: the next ordinal of the model, the file's number of lines after the last.
    """

    ranges: list[Range]
    lines: int
    bytes: int
    next_line: int


def models_of(records: Records, names: Mapping[int, str]) -> list[ModelLines]:
    """Return the models of a sound file in the order of their first lines.

    Args:
        records: of its line index.
        names: by id; KeyError for a line of another.
    """
    ids, firsts, counts = np.unique(records["model"], return_index=True, return_counts=True)
    found = [
        ModelLines(name=names[model_id], model_id=model_id, lines=count, first=first)
        for model_id, first, count in zip(
            ids.tolist(), firsts.tolist(), counts.tolist(), strict=True
        )
    ]
    return sorted(found, key=lambda each: each.first)


def fit(lengths: npt.NDArray[Any], max_bytes: int) -> tuple[int, int]:
    """Return how many of these lines fit, at least one, and their bytes together."""
    ends = np.cumsum(lengths, dtype=np.int64)
    count = max(1, int(np.searchsorted(ends, max_bytes, side="right")))
    return count, int(ends[count - 1])


def cut_model(
    records: Records, model_id: int, start: int, *, max_lines: int, max_bytes: int
) -> Piece | None:
    """Return the next lines of one model from `start` on; None when none are left.

    At most `max_lines` lines and `max_bytes` of input, but at least one line.
    """
    wanted = max(1, max_lines)
    # One more than wanted: where the next piece begins.
    ordinals = _find(records, model_id, start, wanted + 1)
    if not ordinals.size:
        return None
    count, size = fit(records["length"][ordinals[:wanted]], max_bytes)
    return Piece(
        ranges=pack(ordinals[:count].astype(np.uint32)),
        lines=count,
        bytes=size,
        next_line=int(ordinals[count]) if count < ordinals.size else len(records),
    )


def _find(records: Records, model_id: int, start: int, most: int) -> npt.NDArray[np.int64]:
    found: list[npt.NDArray[np.int64]] = []
    left = most
    for at in range(start, len(records), _BLOCK):
        here = np.flatnonzero(records["model"][at : at + _BLOCK] == model_id)[:left] + at
        found.append(here)
        left -= here.size
        if not left:
            break
    return np.concatenate(found) if found else np.zeros(0, np.int64)
