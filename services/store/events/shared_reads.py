"""One read for all who ask for the same within a moment."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Final, TypeVar

T = TypeVar("T")

KEPT_SECONDS: Final = 0.1
"""How long what was read is kept: pages of many readers that are all elsewhere take memory."""


class SharedReads:
    """What is being read, and what was read a moment ago."""

    def __init__(self) -> None:
        """Have read nothing."""
        self._reads: dict[Hashable, tuple[float, asyncio.Task[Any]]] = {}

    async def get(
        self, key: Hashable, since: float, read: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Return what a read of `key` gave that began at `since` or later; raises as it did.

        Args:
            key: names what is read.
            since: the loop's time; of an older read something that was committed is missing.
            read: is called where there is no such read.
        """
        began, task = self._reads.get(key, (0.0, None))
        if task is None or began < since:
            loop = asyncio.get_running_loop()
            task = loop.create_task(read())
            # Whoever asked may have gone meanwhile.
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self._reads[key] = loop.time(), task
            loop.call_later(KEPT_SECONDS, self._drop, key, task)
        result: T = await asyncio.shield(task)
        return result

    def _drop(self, key: Hashable, task: "asyncio.Task[Any]") -> None:
        if self._reads.get(key, (0.0, None))[1] is task:
            del self._reads[key]
