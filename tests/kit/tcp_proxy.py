"""A TCP proxy that can lose what the server answers, or let nothing pass for a while."""

import asyncio
import contextlib
from collections.abc import Iterator
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
        self._open = asyncio.Event()
        self._open.set()
        self._parted = 0
        self._refusing = 0
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
        self._open.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def retarget(self, port: int) -> None:
        """Forward new connections to another port, and cut those that there are."""
        self._target = port
        self.cut()

    def cut(self) -> None:
        """Cut the connections that there are."""
        for writer in self._writers:
            writer.close()

    @contextlib.contextmanager
    def parted(self) -> Iterator[None]:
        """Let nothing pass meanwhile: connections stay, new ones are not answered; all is late."""
        self._parted += 1
        self._open.clear()
        try:
            yield
        finally:
            self._parted -= 1
            if not self._parted:
                self._open.set()

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Cut all connections and take no new ones meanwhile, as if nothing listened there."""
        self._refusing += 1
        self.cut()
        try:
            yield
        finally:
            self._refusing -= 1

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await self._open.wait()
        if self._refusing:
            writer.transport.abort()
            return
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
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
