"""Tasks that must end."""

import asyncio
from typing import Any, Final

_AGAIN_SECONDS: Final = 0.2


async def end(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and return once they have ended, whatever of it they raise.

    They are cancelled until they do: what a task waits in may swallow a cancel, as Python 3.11's
    `asyncio.wait_for` does when its own wait ends at that moment. The broker's client waits so at
    each try to connect, and one that never finds its broker would try on for ever.
    """
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=_AGAIN_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)
