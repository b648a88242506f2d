"""Whole systems on which scenes are played, so that a suite of kills takes the time of a few.

A stage is one `nightshift up`. Its scenes follow one another, and stages pass at the same time:
most of a scene is waiting for something to come back. Each test awaits its own scene.
"""

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from openai import AsyncOpenAI

from services.kit.process import tasks
from tests.kit.batches import Json, Outcome, Watch, check_answers, ids, outcome, submit
from tests.kit.eventually import eventually
from tests.kit.up import RunningUp, is_running


class Stage:
    """One running system and a client that goes through its kills."""

    def __init__(self, data: Path, arguments: Sequence[str]) -> None:
        """Name its data directory and `up`'s arguments; nothing runs before `open`."""
        self._data = data
        self._arguments = arguments
        self._up: RunningUp | None = None
        self._client: AsyncOpenAI | None = None
        self._began: set[int] = set()

    @property
    def up(self) -> RunningUp:
        """The system that runs now."""
        assert self._up is not None
        return self._up

    @property
    def client(self) -> AsyncOpenAI:
        """Asks the system that runs now."""
        assert self._client is not None
        return self._client

    async def open(self) -> None:
        """Start it, and wait until batches can be taken."""
        self._up = RunningUp(self._data, self._arguments)
        await asyncio.to_thread(self._up.wait_ready)
        self._client = AsyncOpenAI(base_url=self._up.base_url, api_key="x", max_retries=8)

    async def close(self) -> None:
        """Stop it in order; nothing of it may be left."""
        if self._client is not None:
            await self._client.close()
        if self._up is None:
            return
        tree = self._up.tree() if self._up.process.poll() is None else []
        status = await asyncio.to_thread(self._up.stop)
        assert status == 0, self._up.log_end()
        assert [pid for pid in tree if is_running(pid)] == []
        assert list((self._data / "run").iterdir()) == []

    async def crash(self) -> None:
        """SIGKILL `up` itself; its children end by themselves."""
        tree = self.up.tree()
        self.up.process.kill()
        await asyncio.to_thread(self.up.stop)
        await eventually(lambda: not any(map(is_running, tree)))
        await self.client.close()

    async def restarted(self, name: str, old_pid: int) -> None:
        """Wait until a child that was killed runs again."""
        await eventually(lambda: self.up.pids().get(name, old_pid) != old_pid)

    async def submit(self, lines: Sequence[Json]) -> Watch:
        """Create a batch that is then followed through whatever happens."""
        return Watch(self.client, await submit(self.client, lines), through_faults=True)

    async def complete(self, watch: Watch, lines: Sequence[Json]) -> Outcome:
        """Wait for the end: each line once, with the answer that is its own."""
        batch = await watch.end(within_seconds=45)
        found = await outcome(self.client, batch, ids(lines))
        assert found.batch.status == "completed"
        assert found.counts == (len(lines), len(lines), 0)
        check_answers(found, lines)
        return found


Scene = Callable[[Stage], Awaitable[None]]


@contextlib.asynccontextmanager
async def played(
    folder: Path, programme: Mapping[str, tuple[Sequence[str], Mapping[str, Scene]]]
) -> AsyncIterator[Mapping[str, "asyncio.Future[None]"]]:
    """Play all scenes of all stages; yields each scene's end by its name.

    Args:
        folder: where the data directories are made.
        programme: `up`'s arguments and scenes in order, by the stage's name.
    """
    loop = asyncio.get_running_loop()
    ends = {name: loop.create_future() for _, scenes in programme.values() for name in scenes}
    stages = {name: Stage(folder / name, arguments) for name, (arguments, _) in programme.items()}

    async def play(name: str) -> None:
        stage, scenes = stages[name], programme[name][1]
        try:
            await stage.open()
            for title, scene in scenes.items():
                try:
                    await scene(stage)
                except Exception as failure:  # noqa: BLE001 -- its test raises it
                    failure.add_note(f"log of the stage:\n{stage.up.log_end(4_000)}")
                    ends[title].set_exception(failure)
                else:
                    ends[title].set_result(None)
        except Exception as failure:  # noqa: BLE001 -- the tests of its scenes raise it
            for title in scenes:
                if not ends[title].done():
                    ends[title].set_exception(failure)

    plays = [asyncio.create_task(play(name), name=name) for name in stages]
    try:
        yield ends
    finally:
        await tasks.end(*plays)
        closed = await asyncio.gather(
            *(stage.close() for stage in stages.values()), return_exceptions=True
        )
        faults = [each for each in closed if isinstance(each, BaseException)]
        for end in ends.values():
            end.cancelled() or not end.done() or end.exception()
        assert not faults, "".join("".join(traceback.format_exception(each)) for each in faults)
