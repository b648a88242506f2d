"""Processes that end with the one that started them, however that ends."""

import asyncio
import os
from typing import Final

VARIABLE: Final = "NIGHTSHIFT_DIE_WITH_PARENT"
"""Set by a parent to its own process id, for children that are not to outlive it."""


async def stop_with_parent(stopping: asyncio.Event) -> None:
    """Set `stopping` when the process that `VARIABLE` names is our parent no more.

    Its id comes from the parent itself: one that dies before we look is noticed too.
    """
    parent = os.environ.get(VARIABLE)
    if not parent:
        return
    # Nothing tells a process that its parent is gone but asking.
    while str(os.getppid()) == parent:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    stopping.set()
