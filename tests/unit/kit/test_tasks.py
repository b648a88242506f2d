"""Ending tasks, also those whose libraries swallow a cancel."""

import asyncio

import pytest

from services.kit.process.tasks import end

pytestmark = pytest.mark.unit


async def stubborn(swallows: int) -> None:
    while True:
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            if swallows == 0:
                raise
            swallows -= 1


async def broken() -> None:
    try:
        await asyncio.sleep(3_600)
    finally:
        raise ValueError("told to nobody")


@pytest.mark.parametrize("swallows", [0, 1, 2])
async def test_a_task_ends_however_often_a_cancel_is_swallowed(swallows: int) -> None:
    tasks = [asyncio.create_task(stubborn(each)) for each in (0, swallows)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await end(*tasks)
    assert all(task.cancelled() for task in tasks)


async def test_what_an_ending_task_raises_hurts_nobody() -> None:
    task = asyncio.create_task(broken())
    await asyncio.sleep(0)
    await end(task)
    assert isinstance(task.exception(), ValueError)
