"""What a check of the store finds wrong, and how to mend it."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from services.store.domain.results import pack

_SHOWN: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        subject: the id of what is at fault; empty where the kind of check says it already.
        what: what is wrong with it, to follow the subject and a colon.
        mend: what to do, one or more sentences.
        sql: a statement that mends it while nothing runs; empty where no statement can.
        blob: name of the blob that is lost, if that is what is wrong.
    """

    subject: str
    what: str
    mend: str
    sql: str = ""
    blob: str = ""


def spoken(ordinals: npt.ArrayLike) -> str:
    """Return line numbers for people: `line 3`, `lines 3-9, 12 and 40 more`."""
    lines = np.unique(np.asarray(ordinals)).astype(np.uint32)
    ranges = pack(lines)
    shown = [f"{first}-{first + n - 1}" if n > 1 else f"{first}" for first, n in ranges[:_SHOWN]]
    left = int(lines.size) - sum(count for _, count in ranges[:_SHOWN])
    more = f" and {left} more" if left else ""
    return f"line{'s' if lines.size > 1 else ''} {', '.join(shown)}{more}"
