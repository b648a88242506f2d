"""Room for frames that wait for their commit."""

import asyncio

import pytest

from services.store.work.result_stream import _Budget

pytestmark = pytest.mark.unit


async def test_a_large_frame_gets_its_turn_among_small_ones() -> None:
    budget = _Budget(10)
    await budget.take(6)
    order: list[str] = []

    async def take(name: str, size: int) -> None:
        await budget.take(size)
        order.append(name)

    waiting = []
    for name, size in (("large", 8), ("first", 1), ("second", 1)):
        waiting.append(asyncio.create_task(take(name, size)))
        await asyncio.sleep(0)
    assert order == []
    budget.give(6)
    await asyncio.gather(*waiting)
    assert order == ["large", "first", "second"]


async def test_who_stops_waiting_holds_up_nobody() -> None:
    budget = _Budget(10)
    await budget.take(10)
    gone, stays = [asyncio.create_task(budget.take(9)) for _ in range(2)]
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait({gone})
    budget.give(10)
    await stays
    # One that is larger than all of it goes alone.
    budget.give(9)
    await budget.take(11)
