"""Which lines of a batch were cut into chunks, by its own counts, and whether these can be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from services.store.domain.checks import statement
from services.store.domain.checks.batch_check import BatchFacts
from services.store.domain.checks.fault import Fault

Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.uint16]

_BY_HAND: Final = "Stop nightshift, run the statement, and check again."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """How far a model of a batch of several is cut; the names are those of the columns."""

    model: str
    pool_id: str
    seq: int
    model_id: int
    lines: int
    cut: int
    next_line: int


class Cut:
    """The lines of a batch that were cut: those of each model up to where it stands."""

    def __init__(self, batch: BatchFacts, models: Sequence[ModelFacts], ids: Ids | None) -> None:
        """Take a batch and, where it has several models, these and the model id of each line."""
        self._batch = batch
        self._models = models
        self._lines = np.arange(batch.lines_total)
        self._ids = np.zeros(0, np.uint16) if ids is None else ids
        #: False where it cannot be told what was cut, which is told by `faults` or elsewhere.
        self.is_known = batch.mixed == bool(models) and (
            not batch.mixed or self._ids.size == batch.lines_total
        )

    def mask(self) -> Mask:
        """Return a flag for each line: whether it was cut."""
        if not self._models:
            return np.asarray(self._lines < self._batch.lines_cut)
        found = np.zeros(self._batch.lines_total, np.bool_)
        for model in self._models:
            found |= self._own(model) & (self._lines < model.next_line)
        return found

    def _own(self, model: ModelFacts) -> Mask:
        return np.asarray(self._ids == model.model_id)

    def place_of(self, model: str | None) -> tuple[str | None, int] | None:
        """Return pool and `seq` that a chunk of this model has; None where there is none."""
        if not self._models:
            return (self._batch.pool_id, self._batch.seq) if model is None else None
        found = [each for each in self._models if each.model == model]
        return (found[0].pool_id, self._batch.seq) if found else None

    def faults(self) -> Iterator[Fault]:
        """Compare the counts of each model with its lines, and the batch's with their sum."""
        if self._batch.mixed != bool(self._models):
            yield Fault(
                subject=self._batch.id,
                what=f"has {len(self._models)} rows of models, but is"
                f" {'' if self._batch.mixed else 'not '}one of several",
                mend="Cancel it, and submit what its error file names again.",
            )
        if not self._models or not self.is_known:
            return
        for model in self._models:
            own = self._own(model)
            right = {
                "lines": int(own.sum()),
                "cut": int((own & (self._lines < model.next_line)).sum()),
                "seq": self._batch.seq,
            }
            wrong = {name: n for name, n in right.items() if getattr(model, name) != n}
            if wrong:
                said = ", ".join(f"{name} is {getattr(model, name)}" for name in wrong)
                yield Fault(
                    subject=self._batch.id,
                    what=f"of its model {model.model}, {said} instead of"
                    f" {', '.join(map(str, wrong.values()))}",
                    mend=_BY_HAND,
                    sql=self._update(model, **wrong),
                )
        cut = int(self.mask().sum())
        if cut != self._batch.lines_cut:
            yield Fault(
                subject=self._batch.id,
                what=f"lines_cut is {self._batch.lines_cut}; its models' come to {cut}",
                mend=_BY_HAND,
                sql=self._batch.update(lines_cut=cut),
            )

    def beyond(self, claimed: Mask) -> Iterator[Fault]:
        """Tell of lines that are in a chunk, and would be cut into another one."""
        wrong = np.flatnonzero(claimed & ~self.mask())
        if not wrong.size:
            return
        last = int(wrong[-1])
        if self._models:
            own = [each for each in self._models if each.model_id == self._ids[last]]
            sql = self._update(own[0], next_line=last + 1) if own else ""
        else:
            sql = self._batch.update(lines_cut=last + 1)
        yield Fault(
            subject=self._batch.id,
            what=f"has chunks up to line {last}, which was not cut yet: lines would run twice",
            mend=_BY_HAND if sql else "Cancel it, and submit what its error file names again.",
            sql=sql,
        )

    def _update(self, model: ModelFacts, **values: object) -> str:
        key = {"batch_id": self._batch.id, "model": model.model}
        return statement.update("batch_models", key, **values)
