"""SIGKILL of every process at a moment when some lines are done and others are not.

Whatever is killed, the batch completes, each line stands once with its own answer, and what a
client sees meanwhile never goes back.
"""

import asyncio
import functools
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping

import openai
import pytest
import pytest_asyncio

from tests.chaos.stage import Scene, Stage, played
from tests.kit.batches import Json, Outcome, Watch, chats, create, jsonl, upload
from tests.kit.eventually import eventually

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(120),
    pytest.mark.slow,
]

SEATS = 64
ACK_WAIT_SECONDS = 10.0


def slow(count: int, delay_ms: int = 400, text: str = "line") -> list[Json]:
    """Lines that hold a seat for a while."""
    return chats(count, text, x_simulate={"delay_ms": delay_ms})


# --- scenes ----------------------------------------------------------------------------------


async def kill_half_way(stage: Stage, *names: str) -> None:
    """These processes die at once, half way through a batch; no name stands for all."""
    lines = slow(400, 1_000)
    watch = await stage.submit(lines)
    await watch.half_way()
    killed = {name: stage.up.kill(name) for name in names or stage.up.pids()}
    for name, pid in killed.items():
        await stage.restarted(name, pid)
    await stage.complete(watch, lines)


async def kill_up_and_start_again(stage: Stage) -> None:
    """`up` dies half way; another one on the same directory goes on."""
    lines = slow(400, 1_000)
    watch = await stage.submit(lines)
    await watch.half_way()
    before = watch.batch
    await stage.crash()
    await stage.open()
    later = Watch(stage.client, before, through_faults=True)
    await stage.complete(later, lines)


async def create_while_the_scheduler_is_dead(stage: Stage) -> None:
    """A batch is created while no scheduler hears of it; the next one finds it."""
    pid = stage.up.kill("scheduler", signal.SIGSTOP)
    try:
        lines = slow(30, 50)
        watch = await stage.submit(lines)
        await watch.until_status("in_progress")
    finally:
        os.kill(pid, signal.SIGKILL)
    await stage.complete(watch, lines)


async def kill_the_store_after_its_answers(stage: Stage) -> None:
    """What the store acknowledged a moment ago is there after its death."""
    lines = slow(50, 50)
    file_id = await upload(stage.client, lines)
    pid = stage.up.kill("store")
    await stage.restarted("store", pid)
    assert (await stage.client.files.content(file_id)).content == jsonl(lines)
    batch = await create(stage.client, file_id)
    pid = stage.up.kill("store")
    await stage.restarted("store", pid)
    await stage.complete(Watch(stage.client, batch, through_faults=True), lines)


async def kill_the_store_while_a_file_arrives(stage: Stage) -> None:
    """An upload that is cut off leaves no file behind, and the client's next try succeeds."""
    lines = chats(20_000, "x" * 500)
    listed = {file.id for file in (await stage.client.files.list()).data}
    arriving = asyncio.create_task(upload(stage.client.with_options(max_retries=0), lines))
    await asyncio.sleep(0)
    await eventually(lambda: any((stage.up.data / "blobs").rglob("*")), every_seconds=0.001)
    pid = stage.up.kill("store")
    await asyncio.wait([arriving])
    await stage.restarted("store", pid)
    whole = {arriving.result()} if arriving.exception() is None else set()
    if not whole:
        assert isinstance(arriving.exception(), openai.APIError)
    now = {file.id for file in (await stage.client.files.list()).data}
    assert now - listed == whole


async def order_through_kills(stage: Stage) -> None:
    """The earlier of two batches is served first, though broker, scheduler and store die."""
    # More than an executor takes on in advance, so that the order is decided while it runs.
    earlier, later = slow(2_400, 100, "earlier"), slow(300, 100, "later")
    first = await stage.submit(earlier)
    second = await stage.submit(later)
    await first.half_way()
    for name in ("scheduler", "nats", "store"):
        pid = stage.up.kill(name)
        await stage.restarted(name, pid)
    found = [await stage.complete(first, earlier), await stage.complete(second, later)]
    answered = [_answered_at(each) for each in found]
    # Whole seconds are all that an answer tells.
    assert min(answered[1]) >= max(answered[0]) - 1, answered


def _answered_at(found: Outcome) -> list[int]:
    return [line["response"]["body"]["created"] for line in found.output]


async def freeze_an_executor(stage: Stage) -> None:
    """A frozen executor loses its lines to the other; what it brings when it wakes is harmless."""
    lines = slow(448, 3_000)
    watch = await stage.submit(lines)
    await watch.half_way()
    pid = stage.up.kill("executor-0", signal.SIGSTOP)
    thaw_at = time.monotonic() + ACK_WAIT_SECONDS + 1
    try:
        await watch.until(lambda: time.monotonic() > thaw_at, 30)
    finally:
        os.kill(pid, signal.SIGCONT)
    await stage.complete(watch, lines)
    # It is the same process, and works again.
    assert stage.up.pids()["executor-0"] == pid
    more = slow(4 * SEATS, 100)
    await stage.complete(await stage.submit(more), more)


def _kill(*names: str) -> Scene:
    return functools.partial(_called_with, names)


async def _called_with(names: tuple[str, ...], stage: Stage) -> None:
    await kill_half_way(stage, *names)


ONE: tuple[str, ...] = ("--engine", "simulated")
TWO = (*ONE, "--executors", "2")

PROGRAMME: dict[str, tuple[tuple[str, ...], dict[str, Scene]]] = {
    "services": (
        TWO,
        {
            "nats": _kill("nats"),
            "store": _kill("store"),
            "scheduler": _kill("scheduler"),
            "gateway": _kill("gateway"),
            "one of two executors": _kill("executor-0"),
            "both executors": _kill("executor-0", "executor-1"),
            "all at once": _kill(),
        },
    ),
    "alone": (
        ONE,
        {
            "the only executor": _kill("executor-0"),
            "order through kills": order_through_kills,
            "created while the scheduler is dead": create_while_the_scheduler_is_dead,
            "the store after its answers": kill_the_store_after_its_answers,
            "the store while a file arrives": kill_the_store_while_a_file_arrives,
            "up itself": kill_up_and_start_again,
        },
    ),
    "frozen": (TWO, {"frozen executor": freeze_an_executor}),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def scenes(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Mapping[str, "asyncio.Future[None]"]]:
    """Begin all scenes."""
    async with played(tmp_path_factory.mktemp("chaos"), PROGRAMME) as ends:
        yield ends


@pytest.mark.parametrize("title", [title for _, scenes in PROGRAMME.values() for title in scenes])
async def test_scene(scenes: Mapping[str, "asyncio.Future[None]"], title: str) -> None:
    await scenes[title]
