"""The official Node client in a process of its own, told what to do line by line.

Node comes from the wheel that requirements/dev.txt pins, the client from
`tests/contract/node/package-lock.json`. Where either is missing, the tests fail.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Self

import pytest_asyncio

NODE: Final = Path(sys.executable).with_name("node")
PACKAGE: Final = Path(__file__).parent.parent / "contract" / "node"
INSTALLED: Final = PACKAGE / "node_modules" / "openai" / "package.json"

ANSWER_BYTES: Final = 16 << 20
ANSWER_SECONDS: Final = 50.0

Json = dict[str, Any]


class NodeClient:
    """One Node process; does one thing at a time, in the order in which it is asked."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Talk to a driver that runs."""
        self._process = process
        self._turn = asyncio.Lock()

    @classmethod
    async def start(cls) -> Self:
        """Start the driver.

        Raises:
            AssertionError: Node or its client is not installed.
        """
        for needed in (NODE, INSTALLED):
            assert needed.exists(), f"{needed} is missing: run `make setup-fast`"
        return cls(
            await asyncio.create_subprocess_exec(
                *(str(NODE), str(PACKAGE / "driver.mjs")),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=ANSWER_BYTES,
            )
        )

    async def do(self, scenario: str, **given: Any) -> Json:
        """Have the driver do something; what it found comes back.

        Raises:
            AssertionError: the driver's code failed; carries its stack.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._turn:
            line = json.dumps({"do": scenario, **given}) + "\n"
            self._process.stdin.write(line.encode())
            answer = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_SECONDS)
        found: Json = json.loads(answer or b'{"error": "the driver has ended"}')
        assert "error" not in found, found["error"]
        value: Json = found["value"]
        return value

    async def stop(self) -> None:
        """End it: its input is over."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 10)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node() -> AsyncIterator[NodeClient]:
    """The Node client, started once for a module's tests."""
    client = await NodeClient.start()
    yield client
    await client.stop()
