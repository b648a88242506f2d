"""Whatever is sent that the description allows, or forbids, is answered as it says, and never 5xx.

`NIGHTSHIFT_FUZZ_SECONDS` sets for how long (60); `make fuzz` runs the same for minutes.
"""

import os
from pathlib import Path

import pytest

from tests.kit.fuzz import answered, fuzz, fuzzed_system
from tests.kit.up import is_running

pytestmark = [pytest.mark.contract, pytest.mark.slow]

SECONDS = float(os.environ.get("NIGHTSHIFT_FUZZ_SECONDS", "60"))
SEED = 1


@pytest.mark.timeout(SECONDS + 180)
def test_no_answer_is_a_fault_of_ours_or_outside_the_description(tmp_path: Path) -> None:
    with fuzzed_system(tmp_path / "data") as (running, ids):
        before = running.pids()
        found = fuzz(running.url, ids, SECONDS, SEED)
        assert found.passed, found.report
        assert "Test cases:" in found.report
        # It has not only knocked at doors that stayed shut.
        counts = answered(running.url)
        for route in (
            *("POST /v1/files", "GET /v1/files", "GET /v1/files/{file_id}"),
            *("POST /v1/batches", "GET /v1/batches", "GET /v1/batches/{batch_id}"),
        ):
            assert counts[route].keys() >= {"200"}, counts
        # Nothing of it took a service down.
        assert running.pids() == before
        assert all(is_running(pid) for pid in before.values())
