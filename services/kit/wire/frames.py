"""Packed records that travel beside the payload of a frame.

A frame carries many lines at once because per-message cost dominates everything else on the hot
path; a numpy view of fixed-size records costs nothing a line to read or to write.
"""

from typing import Final

import numpy as np

FRAME_BYTES: Final = 1024 * 1024
"""Largest payload of one gRPC frame, in bytes; a longer line travels in pieces."""

LINE_RECORD: Final = np.dtype([("line", "<u4"), ("length", "<u4")])
"""One input line of `ReadLinesResponse`: its ordinal in the batch and its length in bytes."""

FAILED_FLAG: Final = 1
"""The line counts as failed and its result belongs to the error file."""

NEVER_RAN_FLAG: Final = 2
"""The line belongs to the error file, and counts neither as completed nor as failed."""

RESULT_RECORD: Final = np.dtype(
    [
        ("line", "<u4"),
        ("offset", "<u4"),
        ("length", "<u4"),
        ("flags", "<u4"),
        ("input_tokens", "<u4"),
        ("cached_tokens", "<u4"),
        ("output_tokens", "<u4"),
        ("reasoning_tokens", "<u4"),
    ]
)
"""One result line of a frame: ordinal, place in the payload (line end included), flags, usage."""
