"""Clients that mean no good, each in a process of its own, and receivers of webhooks that hang.

They run at the lowest priority, so that what is measured beside them is what the services take and
not what these clients do.
"""

import asyncio
import base64
import contextlib
import http.client
import multiprocessing
import os
import secrets
import socketserver
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.system import CHAT, Api, Refused

UPLOADS: Final = 256
CONNECTIONS: Final = 32
MIB: Final = 1024 * 1024
_SETTLE_SECONDS: Final = 3.0


@contextlib.contextmanager
def apart(work: Callable[..., Awaitable[None]], *arguments: Any) -> Iterator[None]:
    """Have `work` done in another process until the block ends."""
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=_run, args=(work, arguments), daemon=True)
    process.start()
    try:
        time.sleep(_SETTLE_SECONDS)
        yield
    finally:
        process.terminate()
        process.join()


def _run(work: Callable[..., Coroutine[Any, Any, None]], arguments: tuple[Any, ...]) -> None:
    os.nice(19)
    asyncio.run(work(*arguments))


def long_lists(count: int) -> bytes:
    """Return lines whose lists of messages are 781 KiB long and hold nothing but `{}`."""
    return b"".join(_line(n, '"messages":' + _empties(781 * 1024)) for n in range(count))


def _line(number: int, field: str) -> bytes:
    head = f'{{"custom_id":"{number}","method":"POST","url":"{CHAT}","body":{{"model":"simulated",'
    return f"{head}{field}}}}}\n".encode()


def _empties(size: int) -> str:
    return "[" + ",".join(["{}"] * (size // 3)) + "]"


async def huge_uploads(url: str, key: str) -> None:
    """Two uploads at once, again and again, each of two lines of nearly 16 MiB."""
    data = _line(0, '"messages":[],"a":' + _empties(16 * MIB - 512)) * 2

    def upload() -> None:
        api = Api(url, key)
        while True:
            with contextlib.suppress(Refused, OSError, http.client.HTTPException):
                api.upload(data)
            time.sleep(0.1)

    await asyncio.gather(asyncio.to_thread(upload), asyncio.to_thread(upload))


async def _again(count: int, work: Callable[[int], Awaitable[None]]) -> None:
    """Do `work` on `count` connections; whose ends begins anew a second later."""

    async def one(number: int) -> None:
        await asyncio.sleep(number / count)
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                await work(number)
            await asyncio.sleep(1)

    await asyncio.gather(*(one(number) for number in range(count)))


def _head(method: str, path: str, key: str, *more: str) -> bytes:
    lines = (f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {key}", *more)
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


@contextlib.asynccontextmanager
async def _connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def idle_uploads(url: str, key: str) -> None:
    """Uploads that send a byte each five seconds."""
    head = _head(
        "POST",
        "/v1/files",
        key,
        "Content-Type: multipart/form-data; boundary=b",
        "Content-Length: 1000000",
    )
    field = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n'

    async def upload(_number: int) -> None:
        async with _connected(url) as (reader, writer):
            writer.write(head + field + file)
            answer = asyncio.create_task(reader.read(1))
            while not answer.done():
                writer.write(b"x")
                await asyncio.wait({answer}, timeout=5)

    await _again(UPLOADS, upload)


async def unknown_keys(url: str, _key: str) -> None:
    """Requests of made-up keys, every other with a fitting checksum: some 400 a second in all."""

    async def ask(number: int) -> None:
        async with _connected(url) as (reader, writer):
            while True:
                writer.write(_head("GET", "/v1/batches", _made_up(checked=number % 2 == 0)))
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                await asyncio.sleep(CONNECTIONS / 400)

    await _again(CONNECTIONS, ask)


def _made_up(*, checked: bool) -> str:
    body = ("nsk-" if checked else "ns-") + secrets.token_urlsafe(32)
    crc = zlib.crc32(body.encode()).to_bytes(4, "big")
    return body + (base64.urlsafe_b64encode(crc).decode().rstrip("=") if checked else "")


async def watchers(url: str, key: str, batch_id: str, count: int) -> None:
    """Follow one batch; who is refused tries again."""

    async def watch(_number: int) -> None:
        async with _connected(url) as (reader, writer):
            writer.write(_head("GET", f"/v1/batches/{batch_id}/events", key))
            while await reader.read(65_536):
                pass

    await _again(count, watch)


class Receiver(socketserver.ThreadingTCPServer):
    """Takes webhooks and answers, or never does."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, *, answers: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = answers
        self.got = threading.Semaphore(0)
        self.ended = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(socketserver.StreamRequestHandler):
    server: Receiver

    def handle(self) -> None:
        if not self.server.answers:
            self.server.ended.wait()
            return
        while self.rfile.readline().strip():
            pass
        self.wfile.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        self.server.got.release()
