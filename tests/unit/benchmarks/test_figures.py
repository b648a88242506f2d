"""What a figure in the table rests on: the input's size, percentiles, budgets, peaks."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.processes import Meter
from benchmarks.report import at_least, at_most, number, percentile
from benchmarks.system import simulated_lines

pytestmark = pytest.mark.unit


def test_lines_are_as_long_as_asked_for_and_all_differ() -> None:
    """A rate in lines of 1 KiB is one of lines of 1,024 bytes."""
    lines = simulated_lines(20, size_bytes=1_024).splitlines(keepends=True)
    assert {len(line) for line in lines} == {1_024}
    read = [json.loads(line) for line in lines]
    assert [one["custom_id"] for one in read] == [f"request-{i:07d}" for i in range(20)]
    assert len({one["body"]["messages"][0]["content"] for one in read}) == 20


def test_what_the_engine_is_told_is_in_the_body() -> None:
    """Delays and the like reach the simulated engine."""
    [line] = simulated_lines(1, simulate={"delay_ms": 5}).splitlines()
    assert json.loads(line)["body"]["x_simulate"] == {"delay_ms": 5}


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (1, 2), (50, 100), (99, 198), (99.5, 199), (100, 200)]
)
def test_percentile_is_the_nearest_rank(percent: float, expected: float) -> None:
    """With 200 values the 99th percentile is the third worst."""
    assert percentile([float(i) for i in range(200, 0, -1)], percent) == expected


def test_budgets_are_met_on_the_right_side() -> None:
    """A rate is met from its bound upwards, a time downwards, both with the bound itself."""
    assert [at_least("b", "w", value, 5).met for value in (4, 5, 6)] == [False, True, True]
    assert [at_most("b", "w", value, 5).met for value in (4, 5, 6)] == [True, True, False]
    assert at_least("b", "w", 1, 20_000, also="floor 5,000").budget == ">= 20,000 (floor 5,000)"


def test_figures_keep_three_digits() -> None:
    """Ratios stay readable and rates short."""
    assert [number(one) for one in (0.973, 12.34, 312.4, 23_456.7)] == [
        "0.97",
        "12.3",
        "312",
        "23,457",
    ]


def test_the_meter_sees_cpu_and_a_peak_that_is_over() -> None:
    """Memory that a process took and gave back counts; so does its CPU time."""
    code = (
        "import sys, time\n"
        "print('up', flush=True); sys.stdin.readline()\n"
        "block = b'x' * 200_000_000; del block\n"
        "began = time.process_time()\n"
        "while time.process_time() - began < 0.3: pass\n"
        "print('done', flush=True); sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ},
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        meter = Meter({"child": child.pid})
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        [usage] = meter.stop()
        child.stdin.close()
    assert usage.name == "child"
    assert usage.cpu_seconds >= 0.25
    assert usage.peak_mib > 190
    assert meter.seconds >= usage.cpu_seconds / 2
