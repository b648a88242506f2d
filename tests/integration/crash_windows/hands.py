"""A scheduler and an executor in one, going on as they do: what got no answer is found again."""

import contextlib
from collections.abc import Collection, Sequence
from typing import Any, Final

from protos.nightshift.v1 import batches_pb2, dispatch_pb2, events_pb2, work_pb2
from services.kit.wire.errors import ConflictError, StaleTermError
from tests.integration.crash_windows.world import Asker, World
from tests.integration.store_work.worker import frame, ranges_of, result
from tests.kit.store import POOL, chat_line, our_errors

COMPLETED: Final = batches_pb2.BATCH_STATUS_COMPLETED
IN_PROGRESS: Final = batches_pb2.BATCH_STATUS_IN_PROGRESS
LONG: Final = "x" * 300_000
"""Makes a frame that becomes a blob."""


async def new_batch(world: World, lines: int = 6, *, window_seconds: int = 86_400) -> str:
    """Create a batch that runs; return its id."""
    content = b"".join(chat_line(f"r{number}") for number in range(lines))
    file = await world.created(lambda asker: asker.upload(content))
    batch = await world.created(lambda asker: asker.create(file.id, window_seconds=window_seconds))
    await world.until(lambda: status_is(world, batch.id, IN_PROGRESS))
    return batch.id


async def status_is(world: World, batch_id: str, *wanted: int) -> bool:
    """Tell whether a batch has one of these statuses."""
    return (await world.do(lambda asker: asker.get(batch_id))).status in wanted


async def take(world: World, batch_id: str) -> dispatch_pb2.Dispatch:
    """Get a chunk of a batch: cut it, or find the one whose message was lost."""
    found: list[dispatch_pb2.Dispatch] = []

    async def try_once() -> bool:
        async def ask(asker: Asker) -> Sequence[dispatch_pb2.Dispatch]:
            try:
                return await asker.cut((batch_id, 100)) or await asker.reclaim()
            except StaleTermError:
                return ()

        found.extend(await world.do(ask))
        return bool(found)

    await world.until(try_once)
    return found[0]


async def open_chunk(
    world: World, batch_id: str, incarnation: str = "i0"
) -> work_pb2.AttemptOpened:
    """Take a chunk and open an attempt of it."""
    opened: list[work_pb2.AttemptOpened] = []

    async def try_once() -> bool:
        dispatch = await take(world, batch_id)
        answer = await world.do(lambda asker: asker.deliver(dispatch, incarnation=incarnation))
        if answer.WhichOneof("outcome") == "opened":
            opened.append(answer.opened)
        return bool(opened)

    await world.until(try_once)
    return opened[0]


async def answer(
    world: World, batch_id: str, opened: work_pb2.AttemptOpened, *, long: Collection[int] = ()
) -> None:
    """Read an attempt's lines, and send a result of each."""
    lines = [n for first, count in ranges_of(opened.lines) for n in range(first, first + count)]
    read = await world.do(lambda asker: asker.lines(opened.token, ranges_of(opened.lines)))
    assert read == {number: chat_line(f"r{number}").rstrip() for number in lines}
    for number in lines:
        text = LONG if number in long else f"answer {number}"
        sent = frame(opened.token, batch_id, [number], failed=failed(number), answer=text)
        await world.do(lambda asker, sent=sent: asker.append(sent))  # type: ignore[misc]  # bound now


def failed(number: int) -> list[int]:
    """Lines whose results are errors: every fourth."""
    return [number] if number % 4 == 3 else []


async def work_off(
    world: World, batch_id: str, *, long: Collection[int] = (), incarnation: str = "i0"
) -> None:
    """Run what is left of a batch until it is completed."""

    async def try_once() -> bool:
        if await status_is(world, batch_id, COMPLETED):
            return True
        if await left(world, batch_id):
            # An attempt that is over: its lines are handed out anew.
            with contextlib.suppress(ConflictError):
                opened = await open_chunk(world, batch_id, incarnation)
                await answer(world, batch_id, opened, long=long)
        return False

    await world.until(try_once)


async def left(world: World, batch_id: str) -> int:
    """Lines of a batch without a result."""
    counts = (await world.do(lambda asker: asker.get(batch_id))).request_counts
    return counts.total - counts.completed - counts.failed


async def check_completed(
    world: World, batch_id: str, lines: int = 6, *, long: Collection[int] = ()
) -> None:
    """Each line stands once, with its own answer, and was counted once."""
    batch = await world.do(lambda asker: asker.get(batch_id))
    assert batch.status == COMPLETED
    good = [number for number in range(lines) if not failed(number)]
    bad = [number for number in range(lines) if failed(number)]
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (lines, len(good), len(bad))
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (3 * lines, 6 * lines)
    for file_id, numbers in ((batch.output_file_id, good), (batch.error_file_id, bad)):
        content = await world.do(lambda asker, file_id=file_id: asker.download(file_id))  # type: ignore[misc]  # bound now
        expected = [
            result(
                batch_id,
                number,
                status=500 if failed(number) else 200,
                answer=LONG if number in long else f"answer {number}",
            )
            for number in numbers
        ]
        assert content == b"".join(expected)


async def report_pools(asker: Asker) -> Any:
    """Tell of an executor, as the leader does."""
    await asker.lead()
    request = work_pb2.ReportPoolsRequest(
        term=asker.term, pools=[work_pb2.PoolReport(pool_id=POOL, executors_alive=1, seats=64)]
    )
    with our_errors():
        return await asker.work.ReportPools(request, metadata=asker.metadata)


class Reader:
    """Follows a batch's results by event id, whichever store it asks."""

    def __init__(self, world: World, batch_id: str) -> None:
        self.lines: list[bytes] = []
        self._world = world
        self._batch_id = batch_id
        self._after = ""
        self._open = b""

    async def read(self, lines: int) -> None:
        """Read until it has so many lines."""

        async def try_once() -> bool:
            await self._read_page()
            return len(self.lines) >= lines

        await self._world.until(try_once)

    async def _read_page(self) -> None:
        watch = events_pb2.WatchBatchRequest(
            batch_id=self._batch_id, include_results=True, after=self._after
        )

        async def ask(asker: Asker) -> events_pb2.ReadBatchEventsResponse:
            request = events_pb2.ReadBatchEventsRequest(watch=watch, wait_ms=0)
            with our_errors():
                return await asker.events.ReadBatchEvents(request, metadata=asker.metadata)

        page = await self._world.do(ask)
        for event in page.events:
            assert not event.HasField("reset")
            *whole, self._open = (self._open + event.results.lines).split(b"\n")
            self.lines += [line + b"\n" for line in whole]
        self._after = page.next
