"""The true end of calls that stream requests, where the other side ends them early.

A write that comes too late turns any status into INTERNAL; see `rpc.StreamEnd`.
"""

from collections.abc import AsyncIterator
from typing import Any

from services.kit.calls import rpc


async def told(call: Any) -> Any:
    """Return the one answer of an open call, or raise what the other side said."""
    end = rpc.StreamEnd(call)
    try:
        return await call
    except rpc.CallFault as fault:
        raise await end.fault(fault) from None


async def all_told(call: Any) -> AsyncIterator[Any]:
    """Yield the answers of an open call, and raise what the other side said at its end."""
    end = rpc.StreamEnd(call)
    try:
        async for answer in call:
            yield answer
    except rpc.CallFault as fault:
        raise await end.fault(fault) from None
