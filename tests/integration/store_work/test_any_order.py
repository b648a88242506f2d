"""Any order of anything, against a model of the store; Hypothesis prints the steps that fail.

`NIGHTSHIFT_MODEL_EXAMPLES=2000 pytest tests/integration/store_work/test_any_order.py` runs longer.
"""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from services.store import database
from tests.integration.store_work.crashing import FakeTime, SQLiteGround
from tests.integration.store_work.machine import StoreMachine

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(36_000)]

EXAMPLES = int(os.environ.get("NIGHTSHIFT_MODEL_EXAMPLES", "40"))
STEPS = int(os.environ.get("NIGHTSHIFT_MODEL_STEPS", "40"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def fake_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every database's time be the test's."""
    monkeypatch.setattr(database, "DatabaseTime", FakeTime)


def test_one_store(tmp_path: Path) -> None:
    with asyncio.Runner() as loop:

        class OneStore(StoreMachine):
            ground = SQLiteGround(tmp_path)
            runner = loop

        run_state_machine_as_test(OneStore, settings=SETTINGS)
