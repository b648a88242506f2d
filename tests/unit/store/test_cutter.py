"""Files of several models are cut for each by itself, and every line goes into one chunk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.domain import cutter
from services.store.domain.cutter import ModelLines, cut_model, fit, models_of
from services.store.domain.index.line_index import RECORD
from services.store.domain.results import count_lines, unpack

pytestmark = pytest.mark.unit

NAMES = {0: "a", 1: "b", 2: "c"}


def records(models: list[int], lengths: list[int] | None = None) -> cutter.Records:
    rows = np.zeros(len(models), RECORD)
    rows["model"] = models
    rows["length"] = lengths if lengths is not None else 10
    return rows


files = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50)), min_size=1, max_size=200)


@given(
    lines=files,
    wants=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 300)), max_size=400
    ),
)
def test_every_line_is_cut_once_in_order_and_in_bounds(
    lines: list[tuple[int, int]], wants: list[tuple[int, int, int]]
) -> None:
    """Whatever the order in which models are cut, and by how much."""
    rows = records([model for model, _ in lines], [length for _, length in lines])
    cursors = {each.model_id: each.first for each in models_of(rows, NAMES)}
    cut: dict[int, list[int]] = {model_id: [] for model_id in cursors}
    for model_id, max_lines, max_bytes in [*wants, *((each, 7, 99) for each in [0, 1, 2] * 200)]:
        if model_id not in cursors:
            continue
        piece = cut_model(
            rows, model_id, cursors[model_id], max_lines=max_lines, max_bytes=max_bytes
        )
        if piece is None:
            assert cursors[model_id] == len(rows)
            continue
        ordinals = unpack(piece.ranges).tolist()
        assert ordinals[0] == cursors[model_id]
        assert {int(rows["model"][each]) for each in ordinals} == {model_id}
        assert len(ordinals) == piece.lines == count_lines(piece.ranges) <= max_lines
        size = int(rows["length"][ordinals].sum())
        assert piece.bytes == size
        assert size <= max_bytes or piece.lines == 1
        cut[model_id] += ordinals
        cursors[model_id] = piece.next_line
        # A piece is as large as it may be, unless its model ends.
        if piece.next_line < len(rows) and piece.lines < max_lines:
            assert size + int(rows["length"][piece.next_line]) > max_bytes
    for model_id, ordinals in cut.items():
        assert ordinals == [at for at, (model, _) in enumerate(lines) if model == model_id]


@given(lines=files)
def test_a_files_models_are_counted_in_order_of_appearance(lines: list[tuple[int, int]]) -> None:
    models = [model for model, _ in lines]
    found = models_of(records(models), NAMES)
    assert [each.model_id for each in found] == list(dict.fromkeys(models))
    for each in found:
        assert each.name == NAMES[each.model_id]
        assert each.first == models.index(each.model_id)
        assert each.lines == models.count(each.model_id)


def test_lines_of_others_are_passed_over_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutter, "_BLOCK", 3)
    rows = records([0] * 10 + [1] + [0] * 5 + [1, 1] + [0] * 4)
    piece = cut_model(rows, 1, 0, max_lines=2, max_bytes=1_000)
    assert piece is not None
    assert (piece.ranges, piece.next_line) == ([(10, 1), (16, 1)], 17)
    piece = cut_model(rows, 1, 17, max_lines=2, max_bytes=1_000)
    assert piece is not None
    assert (piece.ranges, piece.next_line) == ([(17, 1)], len(rows))
    assert cut_model(rows, 1, len(rows), max_lines=2, max_bytes=1_000) is None


def test_one_line_always_fits() -> None:
    assert fit(np.array([500, 1], np.uint32), 10) == (1, 500)
    assert fit(np.array([2**32 - 1] * 3, np.uint32), 2**33) == (2, 2**33 - 2)


def test_a_model_that_is_no_name_of_the_file() -> None:
    with pytest.raises(KeyError):
        models_of(records([0, 7]), NAMES)
    assert models_of(records([2]), NAMES) == [ModelLines(name="c", model_id=2, lines=1, first=0)]
