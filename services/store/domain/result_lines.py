"""Whether stored results are lines of an end file at all: content has no checksums.

What overwrites a file (another one's content, zeros of a disk that lost a block) is seldom made of
our lines, and is known by their ends. A changed letter inside a line is not.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.store.domain.end_check import BEGIN

_BEGIN: Final = np.frombuffer(BEGIN, np.uint8)
_PLACES: Final = np.arange(len(BEGIN))
_LINE_END: Final = ord("\n")


def are_lines(records: npt.NDArray[Any], payload: bytes) -> bool:
    """Tell whether a payload has a line at each place of these RESULT_RECORDs, by its two ends.

    `payload` is as long as the records say.
    """
    if int(records["length"].min(initial=len(BEGIN) + 1)) <= len(BEGIN):
        return False
    data = np.frombuffer(payload, np.uint8)
    starts = records["offset"].astype(np.int64)
    ends = starts + records["length"]
    whole = (data[ends - 1] == _LINE_END).all() and (
        data[starts[:, None] + _PLACES] == _BEGIN
    ).all()
    return bool(whole)


def is_line(begin: bytes | None, end: bytes | None) -> bool:
    """Tell the same of one line's first and last bytes; None is not looked at."""
    return (begin is None or begin.startswith(BEGIN)) and (end is None or end.endswith(b"\n"))
