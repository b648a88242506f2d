"""First durable result wins, whatever comes twice, late or in any order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.wire.frames import FAILED_FLAG, NEVER_RAN_FLAG, RESULT_RECORD
from services.store.domain import results
from services.store.domain.results import BLOCK_LINES, EMPTY_BLOCK, Tally

pytestmark = pytest.mark.unit

in_block = st.lists(st.integers(0, BLOCK_LINES - 1), max_size=60)
# Ordinals around the border of two blocks, where mistakes live.
ordinal = st.integers(0, 40) | st.integers(BLOCK_LINES - 20, BLOCK_LINES + 20)
ranges = st.lists(st.tuples(ordinal, st.integers(0, 30)), max_size=8)
TOTAL = 2 * BLOCK_LINES


def lines_of(spans: list[tuple[int, int]]) -> set[int]:
    return {line for first, count in spans for line in range(first, first + count)}


def records_of(rows: list[tuple[int, int, int]]) -> np.ndarray:
    """Records from (line, flags, tokens)."""
    records = np.zeros(len(rows), dtype=RESULT_RECORD)
    for i, (line, flags, tokens) in enumerate(rows):
        records[i] = (line, 0, 0, flags, tokens, tokens // 2, 2 * tokens, tokens // 3)
    return records


def is_normal(spans: list[tuple[int, int]]) -> bool:
    return spans == results.normalise(spans)


@given(st.lists(in_block, max_size=4))
def test_admit_equals_a_set(calls: list[list[int]]) -> None:
    bits, done = EMPTY_BLOCK, set[int]()
    for lines in calls:
        bits, winners = results.admit(bits, np.array(lines, dtype=np.uint32))
        expected = []
        for line in lines:
            expected.append(line not in done)
            done.add(line)
        assert winners.tolist() == expected
    left = results.remaining(bits, 0, BLOCK_LINES)
    assert lines_of(left) == set(range(BLOCK_LINES)) - done
    assert is_normal(left)


@given(in_block)
def test_admit_again_has_no_winner(lines: list[int]) -> None:
    array = np.array(lines, dtype=np.uint32)
    bits, _ = results.admit(EMPTY_BLOCK, array)
    again, winners = results.admit(bits, array)
    assert again == bits
    assert not winners.any()


@pytest.mark.parametrize("line", [BLOCK_LINES, 2**32 - 1])
def test_admit_refuses_a_line_outside(line: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        results.admit(EMPTY_BLOCK, np.array([line], dtype=np.uint32))


def test_a_block_has_512_bytes() -> None:
    with pytest.raises(ValueError, match="512"):
        results.admit(b"", np.array([0], dtype=np.uint32))
    with pytest.raises(ValueError, match="512"):
        results.remaining(bytes(511), 0, 1)


def test_bit_order_is_fixed() -> None:
    """It is on disk: line 9 is bit 1 of byte 1."""
    bits, _ = results.admit(EMPTY_BLOCK, np.array([9], dtype=np.uint32))
    assert bits == b"\x00\x02" + bytes(510)


@given(
    st.lists(
        st.lists(st.tuples(ordinal, st.integers(0, 3), st.integers(0, 9)), max_size=30), max_size=4
    )
)
def test_admit_results_over_blocks(frames: list[list[tuple[int, int, int]]]) -> None:
    blocks: dict[int, bytes] = {}
    outcomes: dict[int, tuple[int, int]] = {}
    total = Tally()
    for rows in frames:
        records = records_of(rows)
        expected = []
        for line, flags, tokens in rows:
            expected.append(line not in outcomes)
            outcomes.setdefault(line, (flags, tokens))
        admission = results.admit_results(blocks, records, total=TOTAL)
        assert admission.winners.tolist() == expected
        blocks |= admission.blocks
        total += admission.tally
    kinds = [flags for flags, _ in outcomes.values()]
    spent = [n for _, n in outcomes.values()]
    assert total.lines == len(outcomes)
    assert total.never_ran == sum(bool(k & NEVER_RAN_FLAG) for k in kinds)
    assert total.failed == sum(k == FAILED_FLAG for k in kinds)
    assert total.completed == sum(k == 0 for k in kinds)
    assert total.input_tokens == sum(spent)
    assert total.output_tokens == 2 * sum(spent)
    assert total.cached_tokens == sum(n // 2 for n in spent)
    assert total.reasoning_tokens == sum(n // 3 for n in spent)
    left = results.remaining_ranges(blocks, [(0, TOTAL)])
    assert lines_of(left) == set(range(TOTAL)) - outcomes.keys()
    assert is_normal(left)


def test_admit_results_refuses_a_line_beyond_the_batch() -> None:
    with pytest.raises(ValueError, match="batch of 5"):
        results.admit_results({}, records_of([(5, 0, 0)]), total=5)


def test_token_sums_do_not_overflow() -> None:
    big = 2**32 - 1
    assert results.tally(records_of([(0, 0, big // 2)] * 9)).output_tokens == 9 * (big // 2) * 2


def test_the_blocks_of_lines() -> None:
    assert results.blocks_of(np.array([5000, 1, 2], dtype=np.uint32)) == [0, 1]
