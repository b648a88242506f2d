"""Finished lines on their way to the store."""

from typing import cast

import numpy as np
import pytest

from services.executor.attempts import Attempt
from services.executor.engines.base import NO_USAGE, Usage
from services.executor.result_frames import RESULT_FRAME_BYTES, Frame, ResultBuffer
from services.executor.store_client import ranges_of, without_first
from services.kit.wire.frames import FAILED_FLAG, FRAME_BYTES, RESULT_RECORD

pytestmark = pytest.mark.unit


class Named:
    """Stands for an attempt where only its token matters."""

    token = "attempt_1"


ATTEMPT = cast(Attempt, Named())


def test_records_say_where_each_line_is() -> None:
    buffer = ResultBuffer()
    buffer.add(7, b"first\n", 0, Usage(1, 2, 3, 4))
    buffer.add(5, b"second\n", FAILED_FLAG, Usage(2**40, 0, 0, 0))
    frame = buffer.take(ATTEMPT)
    records = np.frombuffer(frame.records, RESULT_RECORD)
    assert records.tolist() == [
        (7, 0, 6, 0, 1, 2, 3, 4),
        # More tokens than fit are as many as fit.
        (5, 6, 7, FAILED_FLAG, 2**32 - 1, 0, 0, 0),
    ]
    assert frame.payload == b"first\nsecond\n"
    assert (len(buffer), buffer.size, frame.lines) == (0, 0, 2)


def test_a_frame_stays_small_enough_for_a_row_unless_one_line_is_larger() -> None:
    buffer = ResultBuffer()
    assert buffer.fits(b"x" * (2 * RESULT_FRAME_BYTES))
    buffer.add(0, b"x" * (RESULT_FRAME_BYTES - 10), 0, NO_USAGE)
    assert buffer.fits(b"x" * 10)
    assert not buffer.fits(b"x" * 11)


def test_a_line_above_a_frame_travels_in_pieces() -> None:
    payload = b"x" * (2 * FRAME_BYTES + 1)
    frame = Frame(ATTEMPT, b"r" * 32, payload)
    frame.number = 3
    messages = list(frame.messages())
    assert [len(one.payload) for one in messages] == [FRAME_BYTES, FRAME_BYTES, 1]
    assert [one.records for one in messages] == [b"r" * 32, b"", b""]
    assert [one.more for one in messages] == [True, True, False]
    assert {(one.token, one.frame) for one in messages} == {("attempt_1", 3)}


def test_ranges() -> None:
    assert ranges_of([]) == []
    assert ranges_of([1, 2, 3, 7, 9, 10]) == [(1, 3), (7, 1), (9, 2)]
    assert without_first([(1, 3), (7, 1)], 0) == [(1, 3), (7, 1)]
    assert without_first([(1, 3), (7, 1)], 2) == [(3, 1), (7, 1)]
    assert without_first([(1, 3), (7, 1)], 3) == [(7, 1)]
    assert without_first([(1, 3), (7, 1)], 9) == []
