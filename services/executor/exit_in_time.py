"""The end of a process that was told to stop and cannot: a thread that hangs in an engine."""

import asyncio
import os
import threading
from typing import Final

from services.kit.process.log import get_logger

_log = get_logger(__name__)

MOST_NAMED: Final = 30
"""Tasks and threads that are named as what did not let go."""


async def end_in_time(stopping: asyncio.Event, seconds: float) -> None:
    """End the process `seconds` after it was told to stop, whatever does not let go.

    All is handed back by then. At exit every thread would be waited for, for ever; the engine's own
    processes end with this one.
    """
    await stopping.wait()
    last = threading.Timer(seconds, _end, [asyncio.get_running_loop()])
    last.daemon = True
    last.start()


def _end(loop: asyncio.AbstractEventLoop) -> None:
    try:
        frames = [frame for task in asyncio.all_tasks(loop) for frame in task.get_stack(limit=1)]
        _log.error(
            "executor_ended_by_force",
            tasks=sorted(f"{one.f_code.co_qualname}:{one.f_lineno}" for one in frames)[:MOST_NAMED],
            threads=sorted(thread.name for thread in threading.enumerate())[:MOST_NAMED],
        )
    finally:
        os._exit(1)
