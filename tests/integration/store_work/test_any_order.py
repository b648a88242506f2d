"""Any order of anything, against a model of the store; Hypothesis prints the steps that fail.

`NIGHTSHIFT_MODEL_EXAMPLES=2000 pytest tests/integration/store_work/test_any_order.py` runs longer.
"""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.integration.store_work.crashing import Ground, PostgresGround, SQLiteGround
from tests.integration.store_work.machine import StoreMachine
from tests.kit.postgres import StoreDatabases

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(36_000),
    pytest.mark.usefixtures("patient_clients"),
]

EXAMPLES = int(os.environ.get("NIGHTSHIFT_MODEL_EXAMPLES", "0"))
STEPS = int(os.environ.get("NIGHTSHIFT_MODEL_STEPS", "50"))
SETTINGS = settings(
    stateful_step_count=STEPS,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def machine(place: Ground, loop: asyncio.Runner) -> type[StoreMachine]:
    class Stores(StoreMachine):
        ground = place
        runner = loop

    return Stores


def run_on(place: Ground, examples: int) -> None:
    with asyncio.Runner() as loop:
        run_state_machine_as_test(
            machine(place, loop), settings=settings(SETTINGS, max_examples=examples)
        )


def test_one_store(tmp_path: Path) -> None:
    run_on(SQLiteGround(tmp_path), EXAMPLES or 15)


def test_two_stores_on_one_database(store_databases: StoreDatabases) -> None:
    run_on(PostgresGround(store_databases), EXAMPLES or 6)


def test_an_opening_may_put_the_very_lines_apart(tmp_path: Path) -> None:
    """Steps that failed once: the third silence in turn is met by who comes to open the chunk."""
    with asyncio.Runner() as loop:
        stores = machine(SQLiteGround(tmp_path), loop)()
        try:
            stores.begin(engines_die=True, last=(0, 0), lines=2, which=0)
            for seconds, again in ((18.5, False), (17.0, False), (6.0, True)):
                stores.wait(seconds=seconds)
                stores.deliver(again=again, executor="e0", fate=("", 0), pick=0, which=0)
            stores.every_batch_is_as_the_model_has_it()
            assert stores.model.batches[0].shaken
        finally:
            stores.teardown()
