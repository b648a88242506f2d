"""A TCP proxy that can lose what the server answers."""

import asyncio
import contextlib
from typing import Self


class TcpProxy:
    """Forwards one port to another while its context is open."""

    def __init__(self, port: int) -> None:
        """Forward to `port` on loopback."""
        self._target = port
        #: While set, what the server sends is thrown away.
        self.lose_answers = False
        #: Bytes that clients sent, ever.
        self.sent = 0
        #: Those bytes themselves, kept where a test asks for it.
        self.kept: bytearray | None = None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Return where it listens."""
        assert self._server is not None, "not open"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cut all connections."""
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Cut the connections that there are."""
        for writer in self._writers:
            writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(
                self._pump(reader, far_writer, answers=False),
                self._pump(far_reader, writer, answers=True),
            )
        finally:
            for each in (writer, far_writer):
                each.close()
                self._writers.discard(each)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                if not answers:
                    self.sent += len(data)
                    if self.kept is not None:
                        self.kept += data
                elif self.lose_answers:
                    continue
                writer.write(data)
                await writer.drain()
        writer.close()
