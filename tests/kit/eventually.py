"""Waiting for a condition, with a deadline, where no event says that it holds."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

T = TypeVar("T")


async def eventually(
    condition: Callable[[], T | Awaitable[T]],
    *,
    within_seconds: float = 10.0,
    every_seconds: float = 0.01,
) -> T:
    """Return what `condition` returns (or resolves to) once that is true.

    Raises:
        AssertionError: it does not become true in time; carries the last value.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_seconds
    while True:
        found = condition()
        value = cast(T, await found if inspect.isawaitable(found) else found)
        if value:
            return value
        if loop.time() > deadline:
            raise AssertionError(f"not so within {within_seconds} s; last value: {value!r}")
        await asyncio.sleep(every_seconds)
