"""Asks one service whether it takes work: `python -m services.kit.probe HOST:PORT`.

For container health checks, where no other client of gRPC's health service is at hand.
"""

import asyncio
import sys
from typing import Final

from services.kit import log, rpc
from services.kit.addresses import parse_addresses

TIMEOUT_SECONDS: Final = 2.0
"""Wait for an answer; below the time-outs that deploy/ gives a health check."""


_MORE_SECONDS: Final = 0.9
"""The same for the question why; both together stay below them."""
_NEEDS: Final = ("database", "blobs", "disk")
"""What a service may say that it lacks."""


async def probe(target: str) -> str:
    """Return why the service at `host:port` takes no work; empty where it does."""
    async with rpc.open_channel(target) as channel:
        if await rpc.is_serving(channel, timeout_seconds=TIMEOUT_SECONDS):
            return ""
        lacking = await rpc.lacking(channel, _NEEDS, timeout_seconds=_MORE_SECONDS)
    lacks = f": {' and '.join(lacking)} cannot be used, its log says why" if lacking else ""
    return f"{target} takes no work right now{lacks}"


def main(arguments: list[str]) -> int:
    """Probe the one address given; returns 0 where it takes work, 1 where not, 2 for misuse."""
    usage = "usage: python -m services.kit.probe HOST:PORT\n"
    if len(arguments) != 1:
        sys.stderr.write(usage)
        return 2
    try:
        parse_addresses(arguments[0])
    except ValueError as error:
        sys.stderr.write(f"{arguments[0]!r} is no address: {error}\n{usage}")
        return 2
    # What several addresses of a name do is told to logs, and this has none.
    log.configure("probe", "ERROR")
    why = asyncio.run(probe(arguments[0]))
    if not why:
        return 0
    sys.stderr.write(f"{why}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
