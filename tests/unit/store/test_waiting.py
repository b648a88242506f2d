"""What a batch waits for, in words."""

import pytest

from services.store.domain.explanation import MOST_AHEAD, NOTHING, Pool, explain
from services.store.domain.state import TERMINAL, BatchStatus

pytestmark = pytest.mark.unit

RUNS = BatchStatus.IN_PROGRESS


def pool(alive: int | None = 2, ready: int | None = 2) -> Pool:
    return Pool(id="p", alive=alive, ready=ready, engine_revision="r")


@pytest.mark.parametrize(
    ("alive", "ready", "ahead", "reason"),
    [
        (2, 2, 0, None),
        (0, 0, 0, "no executor of pool p is alive"),
        (0, 0, 7, "no executor of pool p is alive"),
        (1, 0, 0, "no engine of pool p is ready"),
        (2, 1, 1, "1 batch ahead"),
        (2, 1, 2, "2 batches ahead"),
        (2, 1, MOST_AHEAD, "1000 or more batches ahead"),
        (None, None, 0, None),
        (None, None, 3, "3 batches ahead"),
    ],
)
def test_why_a_running_batch_waits(
    alive: int | None, ready: int | None, ahead: int, reason: str | None
) -> None:
    said = explain(RUNS, pool(alive, ready), ahead)
    assert (said.pool, said.queue_position, said.executors) == ("p", ahead, ready)
    assert (said.reason, said.engine_revision) == (reason, "r")


def test_before_it_is_validated_there_is_nothing_to_say() -> None:
    assert explain(BatchStatus.VALIDATING, None, 0) == NOTHING


@pytest.mark.parametrize(
    "status", [*sorted(TERMINAL), BatchStatus.CANCELLING, BatchStatus.FINALIZING]
)
def test_what_runs_no_more_waits_for_nothing(status: BatchStatus) -> None:
    said = explain(status, pool(0, 0), 5)
    assert (said.pool, said.engine_revision) == ("p", "r")
    assert (said.queue_position, said.executors, said.reason) == (None, None, None)


def test_an_engine_that_does_not_start_says_why() -> None:
    broken = Pool(id="p", alive=1, ready=0, engine_revision=None, trouble="no model in /x")
    words = explain(RUNS, broken, 0, for_operator=True).reason
    assert words == "no engine of pool p is ready: no model in /x"
    # A project is shown none of the engine's own words.
    words = explain(RUNS, broken, 0).reason
    assert words is not None
    assert words.startswith("no engine of pool p is ready: ")
    assert "/x" not in words
    # Others run: its trouble is not what the batch waits for.
    limping = Pool(id="p", alive=2, ready=1, engine_revision=None, trouble="no model in /x")
    assert explain(RUNS, limping, 0).reason is None


@pytest.mark.parametrize(
    ("status", "tries", "words"),
    [
        (BatchStatus.FINALIZING, 2, "writing its end files was begun 2 times and has not ended"),
        (BatchStatus.CANCELLING, 7, "writing its end files was begun 7 times"),
        (BatchStatus.VALIDATING, 3, "checking its input was begun 3 times"),
        (BatchStatus.FINALIZING, 1, None),
        (BatchStatus.IN_PROGRESS, 9, None),
        (BatchStatus.COMPLETED, 9, None),
    ],
)
def test_work_that_does_not_end_is_a_reason(
    status: BatchStatus, tries: int, words: str | None
) -> None:
    reason = explain(status, pool(1, 1), 0, tries=tries).reason
    assert (reason or "").startswith(words or "")
    assert (reason is None) == (words is None)
    assert explain(status, None, 0, tries=tries, fault="gone").reason in ("gone", None)
