"""A file's content: whole, in part, refused, broken."""

import asyncio

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from protos.nightshift.v1 import files_pb2
from services.gateway.main import Listening
from services.kit.wire.errors import NotFoundError
from tests.kit.eventually import eventually
from tests.kit.public_store import ScriptedStore, file_id

pytestmark = pytest.mark.asyncio(loop_scope="session")

CONTENT = bytes(range(256)) * 1024
PATH = f"/v1/files/{file_id()}/content"


async def test_bytes_come_back_equal(client: AsyncOpenAI, store: ScriptedStore) -> None:
    store.add_file(CONTENT, purpose="batch_output", filename="batch_1_output.jsonl")
    answer = await client.files.content(file_id())
    assert answer.content == CONTENT
    headers = answer.response.headers
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-length"] == str(len(CONTENT))
    assert headers["content-disposition"] == 'attachment; filename="batch_1_output.jsonl"'
    assert headers["x-request-id"].startswith("req_")


async def test_streamed_by_the_client(client: AsyncOpenAI, store: ScriptedStore) -> None:
    store.add_file(CONTENT)
    async with client.files.with_streaming_response.content(file_id()) as answer:
        got = b"".join([chunk async for chunk in answer.iter_bytes()])
    assert got == CONTENT


async def test_empty_file(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    store.add_file(b"")
    answer = await http.get(PATH, headers={"accept": "application/binary"})
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == "0"


async def test_head_reads_nothing(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    store.add_file(CONTENT)
    answer = await http.head(PATH)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == str(len(CONTENT))
    assert store.requests("ReadFile") == []


@pytest.mark.parametrize(
    ("name", "disposition"),
    [
        ("a b.jsonl", 'attachment; filename="a b.jsonl"'),
        ("é.jsonl", "attachment; filename=\"_.jsonl\"; filename*=UTF-8''%C3%A9.jsonl"),
        ('a"b\r\nset-cookie: x', "filename*=UTF-8''a%22b%0D%0Aset-cookie%3A%20x"),
    ],
)
async def test_awkward_names(
    http: httpx2.AsyncClient, store: ScriptedStore, name: str, disposition: str
) -> None:
    store.add_file(CONTENT, filename=name)
    answer = await http.get(PATH)
    assert answer.content == CONTENT
    assert disposition in answer.headers["content-disposition"]
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=10-99", 10, 99),
        ("bytes=100-", 100, len(CONTENT) - 1),
        ("bytes=-5", len(CONTENT) - 5, len(CONTENT) - 1),
        (f"bytes=7-{len(CONTENT) + 7}", 7, len(CONTENT) - 1),
        ("bytes=0-", 0, len(CONTENT) - 1),
        (f"bytes=-{len(CONTENT) + 1}", 0, len(CONTENT) - 1),
        ("Bytes=1-2", 1, 2),
    ],
)
async def test_range(
    http: httpx2.AsyncClient, store: ScriptedStore, asked: str, first: int, last: int
) -> None:
    store.add_file(CONTENT)
    answer = await http.get(PATH, headers={"range": asked})
    assert answer.status_code == 206
    assert answer.content == CONTENT[first : last + 1]
    assert answer.headers["content-range"] == f"bytes {first}-{last}/{len(CONTENT)}"


@pytest.mark.parametrize("asked", ["bytes=5-2", "lines=1-2", "bytes=0-1,4-5", "bytes=-", "x"])
async def test_other_ranges_give_the_whole(
    http: httpx2.AsyncClient, store: ScriptedStore, asked: str
) -> None:
    store.add_file(CONTENT)
    answer = await http.get(PATH, headers={"range": asked})
    assert (answer.status_code, answer.content) == (200, CONTENT)


@pytest.mark.parametrize("asked", [f"bytes={len(CONTENT)}-", "bytes=-0"])
async def test_range_outside(http: httpx2.AsyncClient, store: ScriptedStore, asked: str) -> None:
    store.add_file(CONTENT)
    answer = await http.get(PATH, headers={"range": asked})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(CONTENT)}"
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_if_range_of_another_file_gives_the_whole(
    http: httpx2.AsyncClient, store: ScriptedStore
) -> None:
    store.add_file(CONTENT)
    tag = (await http.head(PATH)).headers["etag"]
    same = await http.get(PATH, headers={"range": "bytes=0-0", "if-range": tag})
    other = await http.get(PATH, headers={"range": "bytes=0-0", "if-range": '"other"'})
    assert (same.status_code, other.status_code) == (206, 200)


async def test_content_that_the_client_has_is_not_sent_again(
    http: httpx2.AsyncClient, store: ScriptedStore
) -> None:
    store.add_file(CONTENT)
    tag = (await http.head(PATH)).headers["etag"]
    for method in ("GET", "HEAD"):
        for known in (tag, f'"other", W/{tag}', "*"):
            answer = await http.request(method, PATH, headers={"if-none-match": known})
            assert (answer.status_code, answer.content) == (304, b"")
            assert answer.headers["etag"] == tag
            assert "content-length" not in answer.headers
    assert store.requests("ReadFile") == []
    other = await http.get(PATH, headers={"if-none-match": '"other"'})
    assert (other.status_code, other.content) == (200, CONTENT)


@pytest.mark.parametrize("purpose", ["user_data", "assistants"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "ranged"])
async def test_some_purposes_are_not_given_back(
    http: httpx2.AsyncClient, store: ScriptedStore, purpose: str, method: str
) -> None:
    store.add_file(CONTENT, purpose=purpose)
    headers = {"range": "bytes=0-1"} if method == "ranged" else {}
    answer = await http.request("GET" if method == "ranged" else method, PATH, headers=headers)
    assert answer.status_code == 400
    if method != "HEAD":
        message = answer.json()["error"]["message"]
        assert message == f"Not allowed to download files of purpose: {purpose}"


async def test_unknown_file(client: AsyncOpenAI, store: ScriptedStore) -> None:
    with pytest.raises(openai.NotFoundError, match=f"No such File object: {file_id(9)}"):
        await client.files.content(file_id(9))
    store.script("GetFile", NotFoundError("No such File object: x", param="id"))
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file_id(9))


async def test_store_that_breaks_off_breaks_the_transfer(
    http: httpx2.AsyncClient, store: ScriptedStore
) -> None:
    store.add_file(CONTENT)
    store.break_read_after = 128 * 1024
    with pytest.raises(httpx2.RemoteProtocolError):
        await http.get(PATH)


@pytest.mark.parametrize("said", [len(CONTENT) - 1, len(CONTENT) + 1])
async def test_wrong_length_breaks_the_transfer(
    http: httpx2.AsyncClient, store: ScriptedStore, said: int
) -> None:
    file = store.add_file(CONTENT)
    file.bytes = said
    store.files[file.id] = (file, CONTENT)
    with pytest.raises(httpx2.RemoteProtocolError):
        await http.get(PATH)


async def test_client_that_goes_away_ends_the_read(
    gateway: Listening, store: ScriptedStore
) -> None:
    store.add_file(CONTENT)
    store.read_gate = asyncio.Event()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http_port)
    writer.write(f"GET {PATH} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    await eventually(lambda: store.reads_open() == 1)
    writer.transport.abort()
    await eventually(lambda: store.reads_open() == 0)


async def test_slow_client_holds_back_the_store(gateway: Listening, store: ScriptedStore) -> None:
    sent = 0

    def count(size: int) -> None:
        nonlocal sent
        sent += size

    store.frame_bytes = 1024 * 1024
    store.add_file(bytes(96 * 1024 * 1024))
    store.on_frame = count
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http_port, limit=2**16)
    writer.write(f"GET {PATH} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    before = -1
    while before != sent:  # nobody reads: it must come to rest far from the end
        before = sent
        await asyncio.sleep(0.3)
    assert sent < 48 * 1024 * 1024
    assert store.reads_open() == 1
    writer.transport.abort()
    await eventually(lambda: store.reads_open() == 0)


async def test_get_describes_the_file(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    file = store.add_file(CONTENT, expires_at=1_800_000_000)
    described = (await http.get(f"/v1/files/{file.id}")).json()
    assert described["expires_at"] == 1_800_000_000
    assert described["status"] == "processed"
    assert store.requests("GetFile") == [files_pb2.GetFileRequest(file_id=file.id)]
