"""Lines that meet a fault, and windows that end: what takes seconds, all at the same time.

The first test that asks for one of them begins them all.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types import Batch

from tests.contract.conftest import NOBODY
from tests.kit.batches import (
    Json,
    Outcome,
    chat,
    chats,
    check_answers,
    ended,
    ids,
    outcome,
    submit,
)

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

SEATS = 64
FOREVER = {"delay_ms": 600_000}


@dataclass(frozen=True)
class Case:
    """A batch whose lines meet a fault, or its window's end."""

    lines: list[Json]
    window: str = "24h"


def _cases() -> dict[str, Case]:
    neighbours = chats(12, model="poison", x_simulate={"delay_ms": 150})
    return {
        # Half of it done in time, on a busy machine, too: the first to begin, and less than the
        # time that a line has.
        "over half way": Case(
            [*chats(30), *(chat(f"slow{each}", x_simulate=FOREVER) for each in range(SEATS + 40))],
            window="6s",
        ),
        "hang": Case([*chats(5), chat("hangs", x_simulate={"hang": True})]),
        "500 twice": Case([*chats(3), chat("ill", x_simulate={"status": 500, "times": 2})]),
        "500 for ever": Case([*chats(3), chat("ill", x_simulate={"status": 500})]),
        "429": Case([*chats(3), chat("busy", x_simulate={"status": 429, "times": 2})]),
        "503": Case([*chats(3), chat("busy", x_simulate={"status": 503, "times": 2})]),
        "418": Case([*chats(3), chat("ill", x_simulate={"status": 418, "times": 1})]),
        "poison": Case(
            [
                *neighbours[:7],
                chat("kills", "poison", "poison", x_simulate={"crash": True}),
                *neighbours[7:],
            ]
        ),
        "beside the poison": Case(chats(80, model="poison", x_simulate={"delay_ms": 100})),
        "crash once": Case(
            [
                *chats(70, model="poison", x_simulate={"delay_ms": 60}),
                chat("stumbles", "once", "poison", x_simulate={"crash": 1}),
            ]
        ),
        "engine hangs": Case(
            [
                *chats(3, model="stuck", x_simulate={"delay_ms": 50}),
                chat("stops", "all", "stuck", x_simulate={"hang": "engine"}),
            ]
        ),
        "over before it begins": Case(chats(64, model=NOBODY), window="2s"),
    }


@dataclass(frozen=True)
class Faults:
    """The batches of all cases, under way."""

    client: AsyncOpenAI
    cases: dict[str, Case]
    batches: dict[str, Batch]

    async def outcome(self, name: str, within_seconds: float = 30) -> Outcome:
        """Wait for a case's end and read its files."""
        batch = await ended(self.client, self.batches[name], within_seconds)
        return await outcome(self.client, batch, ids(self.cases[name].lines))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def faults(openai_client: AsyncOpenAI) -> AsyncIterator[Faults]:
    """Begin the batches of all cases."""
    cases = _cases()
    made = await asyncio.gather(
        *(submit(openai_client, case.lines, window=case.window) for case in cases.values())
    )
    yield Faults(openai_client, cases, dict(zip(cases, made, strict=True)))


# contract: 84
async def test_a_window_that_ends_before_anything_ran(faults: Faults) -> None:
    found = await faults.outcome("over before it begins")
    batch = found.batch
    assert batch.status == "expired"
    assert batch.completion_window == "2s"
    assert batch.expires_at == batch.created_at + 2
    assert (batch.expired_at or 0) >= batch.expires_at
    assert batch.completed_at is None
    assert found.counts == (64, 0, 0)
    assert set(found.codes.values()) == {"batch_expired"}
    assert found.errors[0]["error"]["message"] == (
        "This request could not be executed before the completion window expired."
    )
    with pytest.raises(openai.ConflictError):
        await faults.client.batches.cancel(batch.id)


# contract: 84, 85
async def test_a_window_that_ends_half_way(faults: Faults) -> None:
    found = await faults.outcome("over half way")
    assert found.batch.status == "expired"
    assert found.counts == (30 + SEATS + 40, 30, 0)
    assert set(found.answers()) == {f"r{number}" for number in range(30)}
    check_answers(found, faults.cases["over half way"].lines)
    assert await faults.client.batches.retrieve(found.batch.id) == found.batch
    assert set(found.codes.values()) == {"batch_expired"}


async def test_a_passing_fault_is_tried_again(faults: Faults) -> None:
    for name in ("500 twice", "429", "503"):
        found = await faults.outcome(name)
        assert found.counts == (4, 4, 0), name
        check_answers(found, faults.cases[name].lines)


async def test_a_lasting_fault_is_the_result(faults: Faults) -> None:
    found = await faults.outcome("500 for ever")
    assert found.counts == (4, 3, 1)
    assert found.codes == {"ill": 500}
    assert found.errors[0]["response"]["body"]["error"]["type"] == "server_error"
    found = await faults.outcome("418")
    assert found.codes == {"ill": 418}


async def test_a_line_that_hangs_times_out(faults: Faults) -> None:
    found = await faults.outcome("hang")
    assert found.batch.status == "completed"
    assert found.counts == (6, 5, 1)
    assert found.codes == {"hangs": "request_timeout"}


async def test_a_line_that_kills_its_engine_takes_no_other_with_it(faults: Faults) -> None:
    found = await faults.outcome("poison")
    assert found.batch.status == "completed"
    assert found.counts == (13, 12, 1)
    assert found.codes == {"kills": "engine_failure"}
    check_answers(found, faults.cases["poison"].lines)


@pytest.mark.parametrize(("name", "count"), [("beside the poison", 80), ("crash once", 71)])
async def test_lines_beside_a_death_succeed(faults: Faults, name: str, count: int) -> None:
    found = await faults.outcome(name)
    assert found.counts == (count, count, 0)
    check_answers(found, faults.cases[name].lines)


async def test_an_engine_that_hangs_is_found(faults: Faults) -> None:
    found = await faults.outcome("engine hangs", within_seconds=50)
    assert found.counts == (4, 3, 1)
    assert found.codes == {"stops": "engine_failure"}
    check_answers(found, faults.cases["engine hangs"].lines)
