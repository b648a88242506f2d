"""Cancels at any moment, held to the contract over a whole running system."""

import asyncio
import random
import time

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from tests.contract.conftest import NOBODY
from tests.kit.batches import (
    Json,
    Watch,
    chat,
    chats,
    check_answers,
    ended,
    ids,
    outcome,
    run,
    submit,
)
from tests.kit.up import RunningUp

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

SEATS = 64
FOREVER = {"delay_ms": 600_000}


# contract: 74, 75, 76, 77, 78
async def test_cancel_while_it_runs(openai_client: AsyncOpenAI) -> None:
    client = openai_client
    lines = [*chats(20), *(chat(f"slow{each}", x_simulate=FOREVER) for each in range(100))]
    watch = Watch(client, await submit(client, lines))
    await watch.until(lambda: watch.done == 20, 20)
    cancelling = await client.batches.cancel(watch.batch.id)
    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at is not None
    assert cancelling.output_file_id is cancelling.error_file_id is None
    again = await client.batches.cancel(watch.batch.id)
    assert again.status in ("cancelling", "cancelled")
    assert again.cancelling_at == cancelling.cancelling_at
    began = time.monotonic()
    done = await watch.end()
    assert time.monotonic() - began < 5
    assert done.status == "cancelled"
    assert (done.cancelled_at or 0) >= cancelling.cancelling_at
    found = await outcome(client, done, ids(lines))
    assert found.counts == (120, 20, 0)
    check_answers(found, lines)
    assert set(found.codes.values()) == {"batch_cancelled"}
    assert await client.batches.cancel(done.id) == done
    # The seats are free again.
    assert (await run(client, chats(2 * SEATS), 10)).counts == (128, 128, 0)


async def test_cancel_of_what_nobody_runs(openai_client: AsyncOpenAI) -> None:
    lines = chats(3, model=NOBODY)
    watch = Watch(openai_client, await submit(openai_client, lines))
    await watch.until_status("in_progress")
    await openai_client.batches.cancel(watch.batch.id)
    found = await outcome(openai_client, await watch.end(), ids(lines))
    assert found.batch.status == "cancelled"
    assert found.counts == (3, 0, 0)


async def test_cancel_race(openai_client: AsyncOpenAI) -> None:
    """Cancels at any moment: before validation, before dispatch, while it runs, after the end."""
    client = openai_client
    chance = random.Random(20)

    async def race(wait: float, lines: list[Json]) -> str:
        watch = Watch(client, await submit(client, lines))
        await asyncio.sleep(wait)
        try:
            answer = await client.batches.cancel(watch.batch.id)
        except openai.ConflictError:
            assert (await client.batches.retrieve(watch.batch.id)).status == "completed"
        else:
            assert answer.status in ("cancelling", "cancelled")
            assert (await client.batches.cancel(watch.batch.id)).status in (
                "cancelling",
                "cancelled",
            )
        began = time.monotonic()
        done = await watch.end()
        assert time.monotonic() - began < 8
        if done.request_counts is not None and done.request_counts.total == 0:
            # Cancelled before it was validated: its lines were never counted.
            assert done.status == "cancelled"
            assert done.output_file_id is done.error_file_id is None
            return "unvalidated"
        found = await outcome(client, done, ids(lines))
        check_answers(found, lines)
        assert set(found.codes.values()) <= {"batch_cancelled"}
        # One cancelled after its last line has all of them, too.
        assert done.status == "cancelled" or found.counts == (25, 25, 0)
        return done.status

    def lines() -> list[Json]:
        return [
            chat(f"r{each}", f"text {each}", x_simulate={"delay_ms": chance.randrange(300)})
            for each in range(25)
        ]

    races = [race(chance.uniform(0, 0.5), lines()) for _ in range(24)]
    races += [race(0.0, lines()) for _ in range(4)]
    ends = await asyncio.gather(*races)
    assert ends.count("cancelled") > 0
    # At its ease, and all over: what was left of those does not hold seats.
    assert await race(3.0, lines()) == "completed"


# contract: 79, 80
async def test_a_cancel_after_the_end_is_one_request(system: RunningUp) -> None:
    asked: list[str] = []

    async def note(request: httpx2.Request) -> None:
        asked.append(request.url.path)

    async with (
        httpx2.AsyncClient(event_hooks={"request": [note]}) as http,
        AsyncOpenAI(base_url=system.base_url, api_key="x", http_client=http) as client,
    ):
        batch = await ended(client, await submit(client, chats(1)))
        failed = await ended(client, await submit(client, [chat("a", model="unknown")]))
        assert (batch.status, failed.status) == ("completed", "failed")
        for over in (batch, failed):
            asked.clear()
            with pytest.raises(openai.ConflictError) as caught:
                await client.batches.cancel(over.id)
            assert asked == [f"/v1/batches/{over.id}/cancel"]
            assert caught.value.response.headers["x-should-retry"] == "false"
            assert f"Cannot cancel a batch with status '{over.status}'." in str(caught.value)
