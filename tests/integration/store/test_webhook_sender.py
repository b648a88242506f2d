"""One attempt: what is sent, what counts as taken, and where nothing is ever sent."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpcore2
import openai
import pytest

from services.store.domain import webhooks
from services.store.webhooks.public_network import AddressNotAllowedError, PublicBackend, resolve
from services.store.webhooks.sender import Message, Sender
from tests.kit.eventually import eventually
from tests.kit.webhook_receiver import Receiver, running_receiver

pytestmark = pytest.mark.integration

SECRET = webhooks.new_secret(bytes(range(32)))
OTHER = webhooks.new_secret(bytes(range(32, 64)))


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with running_receiver() as running:
        yield running


def message(url: str, *secrets: str) -> Message:
    body = webhooks.payload("evt_1", "batch.completed", "batch_1", 7)
    return Message(id="wh_1", url=url, payload=body, secrets=secrets or (SECRET,))


async def test_what_is_sent_verifies_with_each_live_secret(receiver: Receiver) -> None:
    async with Sender(allow_private=True) as sender:
        answer = await sender.send(message(f"{receiver.url}/a/b?c", SECRET, OTHER), time.time())
    assert (answer.status, answer.error) == (204, None)
    [request] = receiver.received
    assert request.path == "/a/b"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["user-agent"].startswith("Nightshift/")
    assert request.id == "wh_1"
    assert abs(int(request.headers["webhook-timestamp"]) - time.time()) < 5
    assert len(request.headers["webhook-signature"].split(" ")) == 2
    for secret in (SECRET, OTHER):
        event = request.unwrap(secret)
        assert (event.type, event.id, event.created_at) == ("batch.completed", "evt_1", 7)
        assert event.data.id == "batch_1"
    with pytest.raises(openai.InvalidWebhookSignatureError):
        request.unwrap(webhooks.new_secret(bytes(32)))


@pytest.mark.parametrize("status", [200, 201, 202, 299])
async def test_any_2xx_is_taken(receiver: Receiver, status: int) -> None:
    receiver.answers.append(status)
    async with Sender(allow_private=True) as sender:
        assert (await sender.send(message(receiver.url), time.time())).error is None


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400, 404, 410, 429, 500, 503])
async def test_anything_else_is_a_failure_and_no_redirect_is_followed(
    receiver: Receiver, status: int
) -> None:
    receiver.answers.append(status)
    async with Sender(allow_private=True) as sender:
        answer = await sender.send(message(receiver.url), time.time())
    assert (answer.status, answer.error) == (status, f"HTTP status {status}")
    assert [request.path for request in receiver.received] == ["/"]


async def test_a_receiver_that_does_not_answer_is_given_up(receiver: Receiver) -> None:
    receiver.gate.clear()
    began = time.monotonic()
    async with Sender(allow_private=True, timeout_seconds=0.3) as sender:
        answer = await sender.send(message(receiver.url), time.time())
    assert answer.status is None
    assert answer.error == "no answer within 0.3 seconds"
    assert time.monotonic() - began < 3


async def test_an_answer_without_end_is_taken_and_cut_off(receiver: Receiver) -> None:
    receiver.endless = True
    receiver.answers.append(200)
    began = time.monotonic()
    async with Sender(allow_private=True) as sender:
        assert (await sender.send(message(receiver.url), time.time())).error is None
        assert time.monotonic() - began < 5
        await eventually(lambda: receiver.cut_off)


async def test_who_is_not_there_is_a_failure_that_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with Sender(allow_private=True) as sender:
        gone = await sender.send(message(f"http://127.0.0.1:{port}"), time.time())
        unknown = await sender.send(message("http://nobody.invalid"), time.time())
        no_name = await sender.send(message(f"http://{'a' * 64}.example"), time.time())
    assert gone.status is None
    assert gone.error is not None
    assert gone.error.startswith("the connection failed: ")
    assert unknown.error == "the connection failed: the host's name is not known"
    assert no_name.error == unknown.error


async def test_an_answer_that_is_no_http_is_a_failure() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}}")
        writer.write(b"SSH-2.0-OpenSSH\r\n")
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with Sender(allow_private=True) as sender:
            answer = await sender.send(message(f"http://127.0.0.1:{port}"), time.time())
    assert answer.status is None
    assert answer.error == "what answers there does not speak HTTP"


PRIVATE_HOSTS = [
    "127.0.0.1",
    "localhost",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0x7f.0.0.1",
    "017700000001",
    "0",
    "10.0.0.1",
    "169.254.169.254",
    "2852039166",
    "0xa9fea9fe",
    "192.0.0.192",
    "168.63.129.16",
    "100.100.100.200",
    "::1",
    "::",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "fd00:ec2::254",
    "fe80::1",
]


@pytest.mark.parametrize("host", PRIVATE_HOSTS)
async def test_no_spelling_of_a_private_address_is_connected_to(host: str) -> None:
    with pytest.raises(AddressNotAllowedError):
        await resolve(host, 443, allow_private=False)
    assert await resolve(host, 443, allow_private=True)


async def test_nothing_reaches_a_private_receiver_unless_allowed(receiver: Receiver) -> None:
    port = receiver.url.rpartition(":")[2]
    async with Sender(allow_private=False) as sender:
        for host in ("127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]"):
            answer = await sender.send(message(f"http://{host}:{port}/"), time.time())
            assert answer.error == "the host is not on the public internet"
    assert receiver.received == []


class ScriptedNames:
    """A fake resolver: answers each look-up with the next of its lists of addresses."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)

    def __call__(self, host: str, port: int, **_: Any) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in self.answers.pop(0)
        ]


async def test_one_private_address_among_public_ones_spoils_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ScriptedNames(["8.8.8.8", "10.0.0.1"])
    monkeypatch.setattr(socket, "getaddrinfo", names)
    with pytest.raises(AddressNotAllowedError):
        await resolve("both.example", 443, allow_private=False)


async def test_a_name_cannot_change_between_the_judgement_and_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled: list[str] = []

    async def dial(_: object, host: str, *__: object) -> None:
        dialled.append(host)
        raise httpcore2.ConnectError("no network in tests")

    # The second answer is what rebinding would give, were the name looked up again.
    names = ScriptedNames(["8.8.8.8", "8.8.4.4"], ["127.0.0.1"])
    monkeypatch.setattr(socket, "getaddrinfo", names)
    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", dial)
    with pytest.raises(httpcore2.ConnectError):
        await PublicBackend(allow_private=False).connect_tcp("rebinding.example", 443, 1.0)
    assert dialled == ["8.8.8.8", "8.8.4.4"]
    assert names.answers == [["127.0.0.1"]]


async def test_names_that_nobody_resolves_keep_no_other_from_being_looked_up(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver may take half a minute for each, whatever the sender does meanwhile."""
    known, answer_all = socket.getaddrinfo, threading.Event()
    asked: list[str] = []

    def resolver(host: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(host)
        if host.startswith("silent"):
            answer_all.wait(60)
        return known("127.0.0.1" if host.endswith(".example") else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    async with Sender(allow_private=True, timeout_seconds=50) as sender:
        port = receiver.url.rpartition(":")[2]
        silent = [
            asyncio.create_task(
                sender.send(message(f"http://silent{number}.example:{port}/"), time.time())
            )
            for number in range(40)
        ]
        try:
            await eventually(lambda: asked)
            answer = await sender.send(message(f"http://known.example:{port}/"), time.time())
            assert answer.status == 204
        finally:
            answer_all.set()
        await asyncio.gather(*silent)
