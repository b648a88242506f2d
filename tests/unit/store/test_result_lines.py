"""What is stored as results is known for lines of ours by their ends."""

import numpy as np
import pytest

from services.kit.wire.frames import RESULT_RECORD
from services.kit.wire.result_line import no_response_line, success_or_error_line
from services.store.domain.result_lines import are_lines, is_line

pytestmark = pytest.mark.unit

LINES = (
    success_or_error_line("batch_a", 0, b'"r0"', 200, b"{}", "req_1"),
    success_or_error_line("batch_a", 1, b'"r1"', 500, b'{"a":"' + b"x" * 5000 + b'"}', "req_2"),
    no_response_line("batch_a", 2, None, "batch_cancelled"),
)
PAYLOAD = b"".join(LINES)


def records() -> "np.ndarray[tuple[int], np.dtype[np.void]]":
    """Return the places of these lines; not in the order in which they lie."""
    found = np.zeros(len(LINES), RESULT_RECORD)
    found["length"] = [len(line) for line in LINES]
    found["offset"] = np.cumsum(found["length"]) - found["length"]
    return found[::-1].copy()


def test_every_kind_of_line_is_known_for_one() -> None:
    assert are_lines(records(), PAYLOAD)
    assert are_lines(records()[:1], PAYLOAD)
    assert are_lines(records()[:0], b"")
    for line in LINES:
        assert is_line(line, line)
        assert is_line(line, None)
        assert is_line(None, line)


@pytest.mark.parametrize("which", range(len(LINES)))
@pytest.mark.parametrize("at", [0, 10, 16, -1])
def test_one_that_lost_an_end_is_not(which: int, at: int) -> None:
    line = LINES[which]
    at %= len(line)
    broken = line[:at] + b"\0" + line[at + 1 :]
    assert not are_lines(records(), PAYLOAD.replace(line, broken))
    assert not is_line(broken, broken)


@pytest.mark.parametrize("junk", [b"\0", b"\n", b"{", b'{"id":"batch_req_'])
def test_what_is_as_long_and_something_else_is_not(junk: bytes) -> None:
    assert not are_lines(records(), (junk * len(PAYLOAD))[: len(PAYLOAD)])


def test_no_place_is_too_short_to_tell() -> None:
    short = records()
    short["length"] = 3
    assert not are_lines(short, PAYLOAD)
