"""A load balancer as plain as they come: each connection goes to the next target that takes it."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Self


class LoadBalancer:
    """Forwards connections while its context is open; knows nothing of requests."""

    def __init__(self, targets: Sequence[str]) -> None:
        """Forward to these, `host:port` each, in turn."""
        self._targets = list(targets)
        self._turn = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Return where it listens."""
        assert self._server is not None, "not open"
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cut all connections."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            far = await self._connect()
            if far is not None:
                await asyncio.gather(_pump(reader, far[1]), _pump(far[0], writer))
        except asyncio.CancelledError:
            # Its end is no news to whoever made this task.
            return
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to the next target that takes connections; None where none does."""
        for _ in self._targets:
            self._turn += 1
            host, _, port = self._targets[self._turn % len(self._targets)].rpartition(":")
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(host, int(port))
        return None


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()
