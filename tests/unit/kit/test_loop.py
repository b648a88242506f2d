"""A background loop takes turns, wakes at once, survives a failing turn and ends when told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from services.kit.process.loop import Loop
from tests.kit.eventually import eventually

pytestmark = pytest.mark.unit

FAR_AWAY = 3_600.0
"""A tick that no test waits for: a turn that comes has been asked for."""

Run = Callable[[Loop], "asyncio.Task[None]"]


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    """Run loops until the test ends."""
    tasks: list[asyncio.Task[None]] = []

    def start(loop: Loop) -> "asyncio.Task[None]":
        tasks.append(asyncio.create_task(loop.run()))
        return tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Turns:
    """Counts turns; a turn that is held lasts until it is let go."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.hold = False
        self.let_go = asyncio.Event()
        self.fault: BaseException | None = None

    async def __call__(self) -> None:
        self.begun += 1
        if self.hold:
            await self.let_go.wait()
        if self.fault is not None:
            raise self.fault
        self.ended += 1


async def test_the_first_turn_comes_at_once(run: Run) -> None:
    turns = Turns()
    run(Loop("test", turns, tick_seconds=FAR_AWAY))
    await eventually(lambda: turns.ended == 1)


async def test_a_tick_brings_a_turn(run: Run) -> None:
    turns = Turns()
    run(Loop("test", turns, tick_seconds=0.001))
    await eventually(lambda: turns.ended >= 5)


async def test_waking_brings_a_turn_before_the_tick(run: Run) -> None:
    turns = Turns()
    loop = Loop("test", turns, tick_seconds=FAR_AWAY)
    run(loop)
    await eventually(lambda: turns.ended == 1)
    loop.wake()
    await eventually(lambda: turns.ended == 2)


async def test_waking_during_a_turn_brings_one_more_and_only_one(run: Run) -> None:
    turns = Turns()
    turns.hold = True
    loop = Loop("test", turns, tick_seconds=FAR_AWAY)
    run(loop)
    await eventually(lambda: turns.begun == 1)
    for _ in range(3):
        loop.wake()
    turns.let_go.set()
    await eventually(lambda: turns.ended == 2)
    for _ in range(100):
        await asyncio.sleep(0)
    assert turns.begun == 2


async def test_a_failing_turn_is_followed_by_the_next(run: Run) -> None:
    turns = Turns()
    turns.fault = RuntimeError("this turn fails")
    loop = Loop("test", turns, tick_seconds=FAR_AWAY)
    task = run(loop)
    await eventually(lambda: turns.begun == 1)
    turns.fault = None
    loop.wake()
    await eventually(lambda: turns.ended == 1)
    assert not task.done()


async def test_stopping_lets_the_turn_in_progress_end_and_takes_no_other(run: Run) -> None:
    turns = Turns()
    turns.hold = True
    loop = Loop("test", turns, tick_seconds=0.001)
    task = run(loop)
    await eventually(lambda: turns.begun == 1)
    loop.stop()
    assert not task.done()
    turns.let_go.set()
    async with asyncio.timeout(5):
        await task
    assert (turns.begun, turns.ended) == (1, 1)


async def test_stopping_ends_the_wait_for_the_tick(run: Run) -> None:
    turns = Turns()
    loop = Loop("test", turns, tick_seconds=FAR_AWAY)
    task = run(loop)
    await eventually(lambda: turns.ended == 1)
    loop.stop()
    async with asyncio.timeout(5):
        await task


async def test_cancelling_is_no_failing_turn(run: Run) -> None:
    turns = Turns()
    turns.hold = True
    task = run(Loop("test", turns, tick_seconds=0.001))
    await eventually(lambda: turns.begun == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert turns.begun == 1


def test_a_loop_does_nothing_until_it_runs() -> None:
    async def never() -> None:
        raise AssertionError("ran")

    turn: Callable[[], Awaitable[None]] = never
    Loop("test", turn, tick_seconds=0.001).wake()
