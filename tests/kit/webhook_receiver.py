"""A receiver of webhooks: a real HTTP server on loopback that notes each request as it came."""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import uvicorn
from openai import OpenAI
from openai.types.webhooks import UnwrapWebhookEvent
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tests.kit.eventually import eventually

MIB = 1024 * 1024


@dataclass(frozen=True)
class Received:
    """One request, byte for byte."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        """The header by which a receiver knows a repetition."""
        return self.headers["webhook-id"]

    def unwrap(self, secret: str) -> UnwrapWebhookEvent:
        """Verify and read it as a user of the official client does.

        Raises:
            openai.InvalidWebhookSignatureError: no signature is by `secret`.
        """
        client = OpenAI(api_key="none", base_url="http://127.0.0.1:1")
        with client:
            return client.webhooks.unwrap(self.body, self.headers, secret=secret)


@dataclass
class Receiver:
    """Answers with what a test scripts, once each and in order; with 204 after that."""

    url: str = ""
    received: list[Received] = field(default_factory=list)
    answers: deque[int] = field(default_factory=deque)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Answers wait for it; set at first."""
    endless: bool = False
    """Whether answers have a body that never ends."""
    cut_off: bool = False
    """Whether such a body was cut off."""
    at_once: int = 0
    most_at_once: int = 0

    async def got(self, number: int, within_seconds: float = 20.0) -> list[Received]:
        """Wait until so many requests have come; return all."""
        await eventually(lambda: len(self.received) >= number, within_seconds=within_seconds)
        return self.received

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        """Take one request."""
        request = Request(scope, receive)
        headers = dict(request.headers.items())
        path = request.url.path
        self.received.append(Received(path, headers, await request.body()))
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await self.gate.wait()
        finally:
            self.at_once -= 1
        status = self.answers.popleft() if self.answers else 204
        response = Response(status_code=status)
        if 300 <= status < 400:
            response.headers["location"] = f"{self.url}/elsewhere"
        if self.endless:
            response = StreamingResponse(self._endless(), status_code=status)
        await response(scope, receive, send)

    async def _endless(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(MIB)
                # Sending into a closed connection waits for nothing, and nobody else would run.
                await asyncio.sleep(0)
        finally:
            self.cut_off = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Leave signals to the test run."""
        yield


@contextlib.asynccontextmanager
async def running_receiver() -> AsyncIterator[Receiver]:
    """Listen until the block ends."""
    receiver = Receiver()
    receiver.gate.set()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = _Server(
            uvicorn.Config(
                receiver, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1
            )
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        try:
            yield receiver
        finally:
            receiver.gate.set()
            server.should_exit = True
            await task
