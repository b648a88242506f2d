"""End files keep the order of the input, whole, whatever the order of the results was."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.wire.frames import FAILED_FLAG, NEVER_RAN_FLAG, RESULT_RECORD
from services.kit.wire.result_line import (
    BATCH_CANCELLED,
    BATCH_EXPIRED,
    ENGINE_FAILURE,
    MESSAGES,
    REQUEST_TIMEOUT,
)
from services.store.domain import output, results

pytestmark = pytest.mark.unit


def segment_of(rows: list[tuple[int, int]]) -> tuple[np.ndarray, bytes]:
    """Records and payload of (line, flags) in this order; lines differ in length."""
    records = np.zeros(len(rows), RESULT_RECORD)
    payload = b""
    for i, (line, flags) in enumerate(rows):
        text = b"%d/%d%s\n" % (line, flags, b"x" * (line % 7))
        records[i] = (line, len(payload), len(text), flags, 0, 0, 0, 0)
        payload += text
    return records, payload


def written(runs: output.Records, payloads: dict[int, bytes]) -> bytes:
    """The bytes of runs, one after the other."""
    return b"".join(payloads[each][at : at + size] for each, at, size in runs.tolist())


@given(
    st.permutations(range(30)),
    st.lists(st.integers(0, 30), max_size=5),
    st.lists(st.sampled_from([0, 0, FAILED_FLAG, NEVER_RAN_FLAG]), min_size=30, max_size=30),
)
def test_any_order_of_results(order: list[int], cuts: list[int], flags: list[int]) -> None:
    winners, payloads = [], {}
    for number, (a, b) in enumerate(pairwise(sorted({0, 30, *cuts}))):
        records, payload = segment_of([(line, flags[line]) for line in order[a:b]])
        winners.append(output.places(records, number))
        payloads[number] = payload
    runs = output.merge_order(np.concatenate(winners))
    for got, wanted in (
        (runs.output, [n for n in range(30) if not flags[n]]),
        (runs.error, [n for n in range(30) if flags[n]]),
    ):
        assert written(got, payloads) == segment_of([(n, flags[n]) for n in wanted])[1]


def test_a_segment_in_order_is_one_run() -> None:
    records, _ = segment_of([(n, 0) for n in range(4096)])
    runs = output.merge_order(output.places(records, 3))
    assert len(runs.output) == 1
    assert int(runs.output["length"][0]) == int(records["length"].sum())
    assert len(runs.error) == 0


def test_losers_between_winners_are_left_out() -> None:
    records, payload = segment_of([(0, 0), (1, 0), (2, 0)])
    runs = output.merge_order(output.places(records[[0, 2]], 0))
    assert written(runs.output, {0: payload}) == b"0/0\n2/0xx\n"


def test_two_winners_of_a_line_are_refused() -> None:
    records, _ = segment_of([(5, 0), (5, 1)])
    with pytest.raises(ValueError, match="two winners"):
        output.merge_order(output.places(records, 0))


def test_nothing_done() -> None:
    runs = output.merge_order(np.zeros(0, output.PLACE))
    assert (len(runs.output), len(runs.error)) == (0, 0)


@pytest.mark.parametrize(
    ("code", "failed", "never_ran"),
    [
        (BATCH_EXPIRED, 0, 2),
        (BATCH_CANCELLED, 0, 2),
        (REQUEST_TIMEOUT, 2, 0),
        (ENGINE_FAILURE, 2, 0),
    ],
)
def test_lines_without_an_answer(code: str, failed: int, never_ran: int) -> None:
    ids = ["a", 'b"\u2028']
    quoted = [json.dumps(i, ensure_ascii=False).encode() for i in ids]
    records, payload = output.unanswered_frame("batch_1", [4, 9], quoted, code)
    assert records["line"].tolist() == [4, 9]
    for record, custom_id in zip(records, ids, strict=True):
        start, length = int(record["offset"]), int(record["length"])
        text = payload[start : start + length]
        assert len(text.decode().splitlines()) == 1
        line = json.loads(text)
        assert (line["custom_id"], line["response"]) == (custom_id, None)
        assert line["error"] == {"code": code, "message": MESSAGES[code]}
    assert sum(records["length"]) == len(payload)
    tally = results.tally(records)
    assert (tally.completed, tally.failed, tally.never_ran) == (0, failed, never_ran)
    again = output.unanswered_frame("batch_1", [4, 9], quoted, code)
    assert again[1] == payload
    assert not len(output.merge_order(output.places(records, 0)).output)
