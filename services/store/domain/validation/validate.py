"""Which lines of an input are at fault, from its index alone.

Only lines that are reported are read, to say what exactly is wrong and what to change
(`services.store.domain.validation.explain`). Reading is the caller's: `faults` takes a function.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from services.store.domain.index import line_index as li
from services.store.domain.index.body_fields import FIELD_FLAG
from services.store.domain.index.body_shape import Shape
from services.store.domain.index.line_index import LineIndex
from services.store.domain.validation.explain import (
    BatchError,
    Expectation,
    custom_id_of,
    duplicate,
    empty_file,
    explain_line,
    line_too_long,
    more_lines,
    too_many_lines,
    too_many_values,
)

Ordinals = npt.NDArray[np.uint32]

_ALWAYS: Final = (
    li.OBJECT | li.CUSTOM_ID_OK | li.METHOD_POST | li.URL_STRING | li.BODY_OBJECT | li.MODEL_STRING
)


class IndexMismatchError(ValueError):
    """Lines that the index calls faulty read as sound: index and file are not of each other."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of the check. `max_line_bytes` is the one the file was indexed with; with
    `mixed_models` a file may name several."""

    max_batch_lines: int = 50_000
    max_reported_errors: int = 100
    max_line_bytes: int = 16 * 1024 * 1024
    mixed_models: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the index says of a file for one endpoint.

    `lines`: requests. `model`: the name that the first line with a usable model asks for, None
    where there is none. `file_fault`: one fault of the whole file, on which no line is looked at.
    `at_fault`: ordinals with a fault of their own, ascending. `repeats`: ordinals, ascending, whose
    custom_id probably equals that of an earlier line, `originals` the first such line of each; true
    of all but about one pair in 2**64, so that it has to be confirmed by reading both.
    """

    lines: int
    model: str | None
    file_fault: BatchError | None
    at_fault: Ordinals
    repeats: Ordinals
    originals: Ordinals

    @property
    def sound(self) -> bool:
        """Whether the batch may run; when false, `faults` tells (and may find nothing)."""
        return self.file_fault is None and not self.at_fault.size and not self.repeats.size


def unreadable(index: LineIndex) -> Shape | None:
    """What a batch input is refused as when it is uploaded; None where a batch may judge it.

    That is where a line is a JSON object, or was too large to tell: the batch then names the line.
    """
    if index.any_object and index.shape is not Shape.EMPTY:
        return None
    unparsed = bool(np.any(index.records["flags"] & li.UNPARSED))
    if unparsed and index.shape in (Shape.LINES, Shape.PRETTY):
        return None
    return index.shape


def check_input(
    index: LineIndex,
    *,
    endpoint: str,
    served_models: Mapping[str, frozenset[str]],
    limits: Limits,
) -> Verdict:
    """Checks every line by its 24 bytes.

    `served_models`: the endpoints of each model that may be asked for. Raises KeyError for an
    endpoint outside `FIELD_FLAG`.
    """
    required = _ALWAYS | FIELD_FLAG[endpoint]
    none = np.zeros(0, np.uint32)
    if not index.lines:
        return Verdict(0, None, empty_file(), none, none, none)
    if index.truncated or index.lines > limits.max_batch_lines:
        most = min(limits.max_batch_lines, max(len(index.records) - 1, 0))
        fault = too_many_lines(index.lines, most)
        return Verdict(index.lines, None, fault, none, none, none)
    flags = index.records["flags"]
    bad = (flags & (required | li.STREAM)) != required
    # `ANOTHER` stands for many names: it never equals what is asked for.
    url_id = index.urls.index(endpoint) if endpoint in index.urls else li.ANOTHER
    bad |= index.records["url"] != url_id
    usable = {
        number
        for number, name in enumerate(index.models)
        if endpoint in served_models.get(name, frozenset())
    }
    model_id = _first_of(index.records["model"], usable)
    if limits.mixed_models:
        bad |= ~_is_usable(index.records["model"], usable)
    else:
        bad |= index.records["model"] != model_id
    if li.ANOTHER in (url_id, model_id):
        bad[:] = True
    repeats, originals = _repeats(index.records)
    return Verdict(
        lines=index.lines,
        model=None if model_id == li.ANOTHER else index.models[model_id],
        file_fault=None,
        at_fault=np.flatnonzero(bad).astype(np.uint32),
        repeats=repeats,
        originals=originals,
    )


def faults(
    index: LineIndex,
    read_line: Callable[[int], bytes],
    *,
    endpoint: str,
    served_models: Mapping[str, frozenset[str]],
    limits: Limits,
    verdict: Verdict | None = None,
) -> list[BatchError]:
    """Every fault of the file in line order; empty when it may run.

    `read_line(ordinal)` gives the bytes of a request (at its `LineIndex.span`); it is called at
    most twice for each fault reported. After `max_reported_errors` entries a last one says how many
    more lines are at fault. Pass the `verdict` of `check_input` where it is at hand. Raises what
    `read_line` raises, KeyError as `check_input` does, and IndexMismatchError.
    """
    if verdict is None:
        verdict = check_input(index, endpoint=endpoint, served_models=served_models, limits=limits)
    if verdict.file_fault is not None:
        return [verdict.file_fault]
    expectation = Expectation(
        endpoint=endpoint,
        served_models=served_models,
        file_model=None if limits.mixed_models else verdict.model,
    )
    reporter = _Reporter(index, read_line, expectation, limits, verdict)
    candidates = np.union1d(verdict.at_fault, verdict.repeats).tolist()
    errors: list[BatchError] = []
    looked_at = 0
    for ordinal in candidates:
        if len(errors) >= limits.max_reported_errors:
            break
        errors.extend(reporter.faults_of(ordinal))
        looked_at += 1
    if verdict.at_fault.size and not errors:
        raise IndexMismatchError("the index does not belong to the file")
    # A line whose faults do not all fit is shown in part; it is not one of the further lines.
    errors = errors[: limits.max_reported_errors]
    if looked_at < len(candidates):
        errors.append(more_lines(len(candidates) - looked_at))
    return errors


class _Reporter:
    """Reads the lines that are reported, each once, in ascending order."""

    def __init__(
        self,
        index: LineIndex,
        read_line: Callable[[int], bytes],
        expectation: Expectation,
        limits: Limits,
        verdict: Verdict,
    ) -> None:
        self._index = index
        self._read_line = read_line
        self._expectation = expectation
        self._limits = limits
        self._originals = dict(
            zip(verdict.repeats.tolist(), verdict.originals.tolist(), strict=True)
        )
        # By the first ordinal of equal hashes: the ids behind them and where each stood first.
        self._seen: dict[int, dict[str, int]] = {}

    def faults_of(self, ordinal: int) -> list[BatchError]:
        line = self._index.physical_line(ordinal)
        flags = int(self._index.records["flags"][ordinal])
        if flags & li.TOO_LONG:
            length = self._index.span(ordinal)[1]
            return [line_too_long(line, length, self._limits.max_line_bytes)]
        if flags & li.TOO_MANY:
            return [too_many_values(line)]
        raw = self._read_line(ordinal)
        return [
            *self._duplicates(ordinal, line, raw),
            *explain_line(raw, line=line, expectation=self._expectation),
        ]

    def _duplicates(self, ordinal: int, line: int, raw: bytes) -> Iterator[BatchError]:
        original = self._originals.get(ordinal)
        if original is None:
            return
        seen = self._seen.get(original)
        if seen is None:
            seen = self._seen[original] = {custom_id_of(self._read_line(original)): original}
        custom_id = custom_id_of(raw)
        first = seen.setdefault(custom_id, ordinal)
        if first != ordinal:
            yield duplicate(line, custom_id, self._index.physical_line(first))


def _is_usable(ids: npt.NDArray[np.uint16], usable: set[int]) -> npt.NDArray[np.bool_]:
    """A flag for each of `ids`; `ANOTHER` is never usable, since it stands for many names."""
    return np.isin(ids, np.array(sorted(usable - {li.ANOTHER}), np.uint16))


def _first_of(ids: npt.NDArray[np.uint16], usable: set[int]) -> int:
    """The first of `ids` that is usable, `ANOTHER` when none is."""
    at = np.flatnonzero(_is_usable(ids, usable))
    return int(ids[at[0]]) if at.size else li.ANOTHER


def _repeats(records: li.Records) -> tuple[Ordinals, Ordinals]:
    """(ordinals whose hash an earlier line has, the first line with that hash of each)."""
    known = np.flatnonzero(records["flags"] & li.CUSTOM_ID_OK)
    hashes = records["hash"][known]
    in_order = np.sort(hashes)
    if not np.any(in_order[1:] == in_order[:-1]):
        none = np.zeros(0, np.uint32)
        return none, none
    order = np.argsort(hashes, kind="stable")
    in_order = hashes[order]
    again = np.concatenate(([False], in_order[1:] == in_order[:-1]))
    starts = np.maximum.accumulate(np.where(again, 0, np.arange(order.size)))
    repeats, originals = known[order[again]], known[order[starts[again]]]
    by_line = np.argsort(repeats)
    return repeats[by_line].astype(np.uint32), originals[by_line].astype(np.uint32)
