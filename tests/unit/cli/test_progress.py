"""How progress is counted and said."""

import io

from openai.types import Batch
from rich.console import Console

from services.cli.shared.progress import Bar, Json, Lines, Rate, spoken_seconds
from services.cli.up.child import LONGEST_RESTART_SECONDS, RESTART_SECONDS, next_delay


def batch(status: str, done: int, failed: int, total: int) -> Batch:
    return Batch.model_validate(
        {
            "id": "batch_1",
            "object": "batch",
            "endpoint": "/v1/chat/completions",
            "input_file_id": "file-1",
            "completion_window": "24h",
            "created_at": 1,
            "status": status,
            "request_counts": {"completed": done, "failed": failed, "total": total},
        }
    )


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_rate_is_that_of_the_last_while() -> None:
    clock = FakeClock()
    rate = Rate(clock)
    assert rate.lines_per_second() is None
    for second in range(101):
        clock.now = float(second)
        rate.add(second if second < 50 else 50 + (second - 50) * 4)
    assert rate.lines_per_second() == 4.0


def test_a_batch_slower_than_the_while_has_a_rate_too() -> None:
    clock = FakeClock()
    rate = Rate(clock)
    rate.add(0)
    clock.now = 100.0
    rate.add(1)
    assert rate.lines_per_second() == 0.01


def test_no_lines_is_no_rate() -> None:
    clock = FakeClock()
    rate = Rate(clock)
    rate.add(5)
    clock.now = 3.0
    rate.add(5)
    assert rate.lines_per_second() is None


def test_seconds_are_said_as_people_say_them() -> None:
    assert [spoken_seconds(s) for s in (0.4, 59, 200, 18_720)] == [
        "0 s",
        "59 s",
        "3 min 20 s",
        "5 h 12 min",
    ]


def test_plain_lines_come_with_news_only(capsys) -> None:
    lines = Lines()
    for state in (
        batch("validating", 0, 0, 0),
        batch("validating", 0, 0, 0),
        batch("in_progress", 1, 0, 4),
        batch("in_progress", 2, 0, 4),
        batch("completed", 3, 1, 4),
    ):
        lines.show(state)
    assert capsys.readouterr().out.splitlines() == [
        "batch_1 validating",
        "batch_1 in_progress: 1/4 lines, 0 failed",
        "batch_1 completed: 4/4 lines, 1 failed",
    ]


def test_why_a_batch_waits_is_said_while_nothing_is_done(capsys) -> None:
    lines = Lines()
    for state, reason in (
        (batch("in_progress", 0, 0, 4), "2 batches ahead"),
        (batch("in_progress", 0, 0, 4), "2 batches ahead"),
        (batch("in_progress", 0, 0, 4), "1 batch ahead"),
        (batch("in_progress", 1, 0, 4), None),
        (batch("completed", 4, 0, 4), "1 batch ahead"),
    ):
        lines.show(Batch.construct(**state.to_dict(), nightshift={"reason": reason}))
    assert capsys.readouterr().out.splitlines() == [
        "batch_1 in_progress: 0/4 lines, 0 failed, 2 batches ahead",
        "batch_1 in_progress: 0/4 lines, 0 failed, 1 batch ahead",
        "batch_1 in_progress: 1/4 lines, 0 failed",
        "batch_1 completed: 4/4 lines, 0 failed",
    ]


def test_the_bar_ends_on_the_last_counts() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Bar(console) as bar:
        bar.show(batch("validating", 0, 0, 0))
        bar.show(batch("in_progress", 1, 1, 1_000))
        bar.show(batch("completed", 990, 10, 1_000))
    written = console.file
    assert isinstance(written, io.StringIO)
    last = written.getvalue().split("\r")[-1]
    assert "completed" in last
    assert "1,000/1,000 lines" in last
    assert "10 failed" in last


def test_json_lines_come_with_every_change(capsys) -> None:
    display = Json()
    for done in (0, 0, 1, 1, 2):
        display.show(batch("in_progress", done, 0, 2))
    lines = [Batch.model_validate_json(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.request_counts.completed for line in lines if line.request_counts] == [0, 1, 2]


def test_a_child_that_had_run_starts_again_within_half_a_second() -> None:
    assert next_delay(LONGEST_RESTART_SECONDS, 1.0) == RESTART_SECONDS <= 0.5


def test_the_pause_grows_to_five_seconds_only_for_a_child_that_cannot_live() -> None:
    delay = 0.0
    delays = []
    for _ in range(12):
        delay = next_delay(delay, 0.2)
        delays.append(delay)
    assert delays[0] <= 0.5
    assert delays == sorted(delays)
    assert delays[-1] == LONGEST_RESTART_SECONDS == 5.0
    assert next_delay(delay, 30.0) == RESTART_SECONDS
