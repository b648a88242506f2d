"""Bounds what the long lines of all uploads take: a line is kept until its end has come."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeVar

from services.kit.wire.errors import UnavailableError
from services.kit.wire.ids import ProjectId
from services.store.domain.index.line_index import LineIndexer

LONG_BYTES: Final = 1024 * 1024
"""An open line above this is long, and needs one of the `LINES`."""
LINES: Final = 8
"""Long lines that are taken in at once; each takes up to `max_line_bytes`."""
WAIT_SECONDS: Final = 30.0

Result = TypeVar("Result")


class LongLines:
    """The long lines of all uploads of this process."""

    def __init__(self) -> None:
        """Begin with none."""
        self._by_project: Counter[ProjectId] = Counter()
        self._ended = asyncio.Event()
        self.alone = asyncio.Lock()
        """Held while one of them is indexed: the parser holds the interpreter anyway, and so the
        values of one long line at most are in memory."""

    def of(self, project_id: ProjectId) -> "LongLine":
        """Return what one upload of a project feeds its index through."""
        return LongLine(self, project_id)

    async def begin(self, project_id: ProjectId) -> None:
        """Wait for one to be free. A project has at most as many as it leaves to all others.

        Raises:
            UnavailableError: none was for too long.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while self._by_project[project_id] >= LINES - self._by_project.total():
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            raise UnavailableError(
                f"Too many lines above {LONG_BYTES} bytes are being uploaded; try again."
            ) from None
        self._by_project[project_id] += 1

    def end(self, project_id: ProjectId) -> None:
        """Let another begin."""
        self._by_project[project_id] -= 1
        if not self._by_project[project_id]:
            del self._by_project[project_id]
        self._ended.set()


class LongLine:
    """The long line of one upload, while it has one. Call `end` when the upload ends."""

    def __init__(self, lines: LongLines, project_id: ProjectId) -> None:
        """Begin without one."""
        self._lines = lines
        self._project_id = project_id
        self._has = False

    async def feed(self, indexer: LineIndexer, data: bytes) -> None:
        """Give `indexer` the upload's next bytes.

        Raises:
            UnavailableError: too many long lines were open for too long.
        """
        await self.run(indexer, lambda: indexer.feed(data))

    async def run(self, indexer: LineIndexer, work: Callable[[], Result]) -> Result:
        """Run in a thread what may parse the open line of `indexer`, and return its result.

        Raises:
            UnavailableError: too many long lines were open for too long.
        """
        if not self._has and indexer.open_bytes > LONG_BYTES:
            await self._lines.begin(self._project_id)
            self._has = True
        if not self._has:
            return await asyncio.to_thread(work)
        async with self._lines.alone:
            result = await asyncio.to_thread(work)
        if indexer.open_bytes <= LONG_BYTES:
            self.end()
        return result

    def end(self) -> None:
        """Have none any more; repeatable."""
        if self._has:
            self._has = False
            self._lines.end(self._project_id)
