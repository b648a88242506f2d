"""The end of a process that was told to stop and cannot: a thread that hangs in an engine."""

import asyncio
import os
import threading

from services.kit.log import get_logger

_log = get_logger(__name__)


async def end_in_time(stopping: asyncio.Event, seconds: float) -> None:
    """End the process `seconds` after it was told to stop, whatever does not let go.

    All is handed back by then. At exit every thread would be waited for, for ever; the engine's own
    processes end with this one.
    """
    await stopping.wait()
    last = threading.Timer(seconds, _end)
    last.daemon = True
    last.start()


def _end() -> None:
    _log.error("executor_ended_by_force")
    os._exit(1)
