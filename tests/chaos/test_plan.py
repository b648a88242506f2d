"""Plans by their seeds, and those who judge afterwards: the suite is only as good as they are."""

import copy
import random

import pytest

from tests.chaos.ledger import Violation
from tests.chaos.plan import Card, draw
from tests.chaos.verify import check_repeated
from tests.chaos.workload import Order, check_line, deadly, embeddings, expiring, mixed, steady
from tests.kit.batches import Json, answer_to, chat
from tests.kit.started_lines import Started

pytestmark = pytest.mark.chaos

DECK = (
    Card(kind="kill", choices=(("store-0",), ("store-1",)), longest=4.0),
    Card(kind="freeze", choices=(("executor-0",),), shortest=10.0, longest=12.0),
    Card(kind="part", choices=(("gateway-0", "store"),), shortest=1.0, longest=2.0),
)


def test_a_seed_is_a_plan() -> None:
    assert draw(7, DECK, 300) == draw(7, DECK, 300)
    assert str(draw(7, DECK, 300)) != str(draw(8, DECK, 300))


def test_everything_comes_before_anything_comes_again() -> None:
    faults = draw(7, DECK, 300).faults
    assert len(faults) > 12
    for start in range(0, len(faults) - 3, 3):
        assert {fault.kind for fault in faults[start : start + 3]} == {"kill", "freeze", "part"}
    assert {fault.targets for fault in faults if fault.kind == "kill"} == {
        ("store-0",),
        ("store-1",),
    }


@pytest.mark.parametrize("order", [steady, mixed, embeddings, expiring, deadly])
def test_the_same_seed_makes_the_same_batches(order: object) -> None:
    assert callable(order)
    assert order(random.Random(3), "b") == order(random.Random(3), "b")


def answered(line: Json, content: str, status: int = 200) -> Json:
    """A result line with this content."""
    body = {"choices": [{"message": {"content": content}}]}
    response = {"status_code": status, "body": body}
    return {"custom_id": line["custom_id"], "response": response, "error": None}


def gave_up(line: Json, code: str) -> Json:
    """A result line without a response."""
    return {"custom_id": line["custom_id"], "response": None, "error": {"code": code}}


def test_the_judge_knows_a_line_s_own_answer() -> None:
    line = chat("a", "text a")
    order = Order(kind="steady", lines=(line,))
    right = answered(line, answer_to("text a"))
    check_line(order, line, right, "completed")
    check_line(order, line, gave_up(line, "batch_expired"), "expired")
    other = answered(line, answer_to("text b"))
    wrong_status = copy.deepcopy(right)
    wrong_status["response"]["status_code"] = 500
    for result, status in (
        (other, "completed"),
        (wrong_status, "completed"),
        (gave_up(line, "batch_expired"), "completed"),
        (gave_up(line, "batch_expired"), "cancelled"),
        (gave_up(line, "request_timeout"), "completed"),
        (gave_up(line, "engine_failure"), "completed"),
    ):
        with pytest.raises(AssertionError):
            check_line(order, line, result, status)


def test_the_judge_knows_which_lines_fail() -> None:
    refused = chat("a", "text", max_tokens=0)
    order = Order(kind="mixed", lines=(refused,))
    check_line(order, refused, answered(refused, "", 400), "completed")
    with pytest.raises(AssertionError):
        check_line(order, refused, answered(refused, answer_to("text")), "completed")
    hangs = chat("b", "text", x_simulate={"hang": True})
    check_line(order, hangs, gave_up(hangs, "request_timeout"), "completed")
    with pytest.raises(AssertionError):
        check_line(order, hangs, answered(hangs, answer_to("text")), "completed")


def begun(line: int, executor: str, *, retries: int = 0) -> Started:
    """A line that got a seat."""
    return Started(
        at=float(line),
        executor=executor,
        incarnation="1",
        batch_id="batch",
        line=line,
        attempt=1,
        retries=retries,
    )


def test_work_is_done_again_only_after_a_hit() -> None:
    retried = [begun(1, "executor-0"), begun(1, "executor-0", retries=1)]
    check_repeated(retried, {}, deaths=0)
    again = [begun(1, "executor-0"), begun(1, "executor-1")]
    check_repeated(again, {"executor-0": 1}, deaths=0)
    check_repeated(again, {}, deaths=1)
    with pytest.raises(Violation, match="executor-0"):
        check_repeated(again, {"executor-1": 5}, deaths=0)
    # More than its seats, the chunk and the second's lines that it may hold beside them.
    many = [begun(line, "executor-0") for line in range(2_000)]
    with pytest.raises(Violation):
        check_repeated([*many, *many], {"executor-0": 1}, deaths=0)
