"""Engines that need nothing installed keep the promises of the seam. (vLLM: tests/e2e.)"""

from collections.abc import AsyncIterator

import pytest

from services.executor.engines.base import RequestAborted
from services.executor.engines.simulated.engine import SimulatedEngine
from tests.kit.engine_contract import EngineContract, Subject, all_settled

pytestmark = pytest.mark.contract


@pytest.fixture
async def subject() -> AsyncIterator[Subject]:
    engine = SimulatedEngine()
    await engine.start()

    async def kill() -> None:
        engine.submit(made.request(made.chat(x_simulate={"crash": True})))

    made = Subject(
        engine=engine,
        model="simulated",
        endless={"x_simulate": {"hang": True}},
        kill=kill,
        refused=[
            {"model": "simulated", "messages": [{"role": "user", "content": "w " * 100_001}]},
            {"model": "simulated", "messages": [{"role": "user", "content": 5}]},
            {"model": "simulated", "messages": ["hi"]},
        ],
    )
    yield made
    await engine.close()


class TestSimulated(EngineContract):
    """The simulated engine."""

    async def test_close_aborts_what_is_in_flight(self, subject: Subject) -> None:
        answers = subject.engine.submit_many(subject.endless_requests(70))
        await subject.engine.close()
        await subject.engine.close()
        outcomes = await all_settled(answers)
        assert {type(outcome) for outcome in outcomes} == {RequestAborted}
        await subject.engine.start()
        assert (await subject.engine.submit(subject.request())).status == 200
