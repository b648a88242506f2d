"""Files, numbers 1 to 23 of the contract, over a whole running system."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import FileObject

from tests.contract.conftest import MAX_BATCH_FILE_BYTES, MAX_FILE_BYTES
from tests.kit.batches import Json, chat, chats, create, ended, jsonl, upload

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

FILE_KEYS: Final = {
    *("id", "object", "bytes", "created_at", "expires_at", "filename", "purpose"),
    *("status", "status_details"),
}
PURPOSES: Final = ["fine-tune", "assistants", "batch", "user_data", "vision", "evals"]
THIRTY_DAYS: Final = 2_592_000
UNKNOWN: Final = "file-" + "0" * 32
BOUNDARY: Final = "a-boundary"
FORM: Final = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
PATH: Final = "/v1/files"


def form(*parts: tuple[str, bytes]) -> bytes:
    """Return a form in just this order; the part named `file` has a filename."""
    whole = b""
    for name, value in parts:
        tail = b'; filename="in.jsonl"' if name == "file" else b""
        head = b'Content-Disposition: form-data; name="%s"%s' % (name.encode(), tail)
        whole += b"--%s\r\n%s\r\n\r\n%s\r\n" % (BOUNDARY.encode(), head, value)
    return whole + b"--%s--\r\n" % BOUNDARY.encode()


async def made(client: AsyncOpenAI, data: bytes, purpose: str, **fields: Any) -> FileObject:
    """Upload bytes under a plain name."""
    return await client.files.create(
        file=("in.jsonl", data),
        purpose=purpose,  # type: ignore[arg-type]
        **fields,
    )


async def all_ids(client: AsyncOpenAI, **query: Any) -> list[str]:
    """Page through a list."""
    return [file.id async for file in client.files.list(**query)]


def error_of(answer: httpx2.Response, status: int = 400) -> Json:
    """Return the error of a refusal; the envelope is checked."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert list(answer.json()) == ["error"]
    error: Json = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


# contract: 1
async def test_an_upload_from_a_handle(openai_client: AsyncOpenAI, tmp_path: Any) -> None:
    content = jsonl(chats(20))
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with path.open("rb") as handle:
        file = await openai_client.files.create(file=handle, purpose="batch")
    assert file.id.startswith("file-")
    assert file.bytes == len(content)
    assert (file.purpose, file.status, file.filename) == ("batch", "processed", "in.jsonl")


# contract: 2, 6
@pytest.mark.parametrize("file_first", [True, False])
async def test_nine_keys_whatever_the_order_of_parts(
    http: httpx2.AsyncClient, file_first: bool
) -> None:
    content = jsonl(chats(2))
    parts = [("file", content), ("purpose", b"batch")]
    body = form(*(parts if file_first else reversed(parts)))
    answer = await http.post(PATH, content=body, headers=FORM)
    assert answer.status_code == 200
    file = answer.json()
    assert file.keys() == FILE_KEYS
    assert file["status_details"] is None
    assert (file["bytes"], file["purpose"], file["object"]) == (len(content), "batch", "file")
    assert (await http.get(f"{PATH}/{file['id']}")).json() == file
    assert (await http.get(f"{PATH}/{file['id']}/content")).content == content


# contract: 3
async def test_default_expiry(openai_client: AsyncOpenAI) -> None:
    batch = await made(openai_client, jsonl(chats(1)), "batch")
    other = await made(openai_client, b"x", "user_data")
    assert batch.expires_at == batch.created_at + THIRTY_DAYS
    assert other.expires_at is None


# contract: 4
async def test_an_expiry_that_is_asked_for(openai_client: AsyncOpenAI) -> None:
    for seconds in (3_600, THIRTY_DAYS):
        expiry = {"anchor": "created_at", "seconds": seconds}
        file = await made(openai_client, b"x", "user_data", expires_after=expiry)
        assert file.expires_at == file.created_at + seconds
    for seconds in (3_599, THIRTY_DAYS + 1):
        expiry = {"anchor": "created_at", "seconds": seconds}
        with pytest.raises(openai.BadRequestError) as caught:
            await made(openai_client, b"x", "user_data", expires_after=expiry)
        assert caught.value.param == "expires_after.seconds"


HOSTILE_NAMES: Final = [
    "two words é.jsonl",
    "日本語\N{CRESCENT MOON}.jsonl",
    "../../../etc/passwd",
    "/etc/passwd",
    "..",
    "%2e%2e%2f",
    "a;b&&c|d`e`$(f)",
    "' OR 1=1; DROP TABLE files;--",
    "<script>alert(1)</script>",
    "x" * 255 + ".jsonl",
    "CON",
    " ",
]


# contract: 7
@pytest.mark.parametrize("name", HOSTILE_NAMES)
async def test_a_filename_comes_back_unchanged(openai_client: AsyncOpenAI, name: str) -> None:
    content = jsonl(chats(1))
    file = await openai_client.files.create(file=(name, content), purpose="batch")
    assert file.filename == name
    assert (await openai_client.files.retrieve(file.id)).filename == name
    answer = await openai_client.files.content(file.id)
    assert answer.content == content
    assert answer.response.headers["content-disposition"].startswith("attachment; filename=")


async def test_a_windows_path_is_its_last_part(openai_client: AsyncOpenAI) -> None:
    # As old browsers sent it; python-multipart has always read it so.
    file = await openai_client.files.create(
        file=("C:\\Users\\me\\in.jsonl", jsonl(chats(1))), purpose="batch"
    )
    assert file.filename == "in.jsonl"


async def test_a_filename_without_end_is_refused(http: httpx2.AsyncClient) -> None:
    name = b"n" * 2_000_000
    body = form(("file", b"{}\n"), ("purpose", b"batch")).replace(b"in.jsonl", name)
    error = error_of(await http.post(PATH, content=body, headers=FORM))
    assert len(error["message"]) < 1_000


# contract: 8
async def test_bare_bytes_as_a_batch_file(openai_client: AsyncOpenAI) -> None:
    file = await openai_client.files.create(file=jsonl(chats(1)), purpose="batch")
    assert file.filename == "upload"
    assert (await ended(openai_client, await create(openai_client, file.id))).status == "completed"


# contract: 9
async def test_a_purpose_that_is_none(openai_client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await made(openai_client, b"{}\n", "bogus")
    assert caught.value.param == "purpose"
    assert f"'bogus' is not one of {PURPOSES} - 'purpose'" in str(caught.value)


# contract: 10
async def test_a_part_is_missing(http: httpx2.AsyncClient) -> None:
    for parts, says in (
        ([("purpose", b"batch")], "'file' is a required property"),
        ([("file", b"{}\n")], "'purpose' is a required property"),
    ):
        answer = await http.post(PATH, content=form(*parts), headers=FORM)
        assert says in error_of(answer)["message"]


# contract: 11
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (jsonl(chats(2)).decode().encode("utf-16"), "Must be utf-8 encoded"),
        (jsonl(chats(2)).decode().encode("utf-16-le"), "Must be utf-8 encoded"),
        (b"", "Invalid file format for Batch API. Must be .jsonl"),
        (b"\n \r\n\t\n", "Invalid file format for Batch API. Must be .jsonl"),
    ],
    ids=["utf-16", "utf-16-le", "empty", "blank"],
)
async def test_no_batch_input(openai_client: AsyncOpenAI, content: bytes, says: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await made(openai_client, content, "batch")
    assert says in str(caught.value)


# contract: 12
@pytest.mark.parametrize("broken", [0, 1, 2])
async def test_a_broken_line_is_the_batchs_to_name(openai_client: AsyncOpenAI, broken: int) -> None:
    lines = jsonl(chats(3)).splitlines(keepends=True)
    lines[broken] = lines[broken][:-3] + b"\n"
    file_id = await upload(openai_client, b"".join(lines))
    done = await ended(openai_client, await create(openai_client, file_id))
    assert done.status == "failed"
    assert done.errors is not None
    [error] = done.errors.data or []
    assert (error.line, error.code) == (broken + 1, "invalid_json_line")

    with pytest.raises(openai.BadRequestError, match="Invalid file format for Batch API"):
        await upload(openai_client, b"{broken\n[1]\n")


async def in_pieces(parts: list[bytes]) -> AsyncIterator[bytes]:
    """Send without a length."""
    for part in parts:
        yield part


# contract: 13
@pytest.mark.parametrize(
    ("purpose", "limit"), [("batch", MAX_BATCH_FILE_BYTES), ("user_data", MAX_FILE_BYTES)]
)
@pytest.mark.parametrize("with_length", [True, False])
async def test_past_the_limit(
    http: httpx2.AsyncClient,
    openai_client: AsyncOpenAI,
    purpose: str,
    limit: int,
    with_length: bool,
) -> None:
    before = await all_ids(openai_client)
    line = jsonl([chat("a", "w" * 65_000)])
    body = form(("file", line * (limit // len(line) + 1)), ("purpose", purpose.encode()))
    pieces = [body[start : start + 65_536] for start in range(0, len(body), 65_536)]
    content = body if with_length else in_pieces(pieces)
    answer = await http.post(PATH, content=content, headers=FORM)
    assert answer.status_code in (400, 413)
    assert str(limit) in error_of(answer, answer.status_code)["message"]
    assert await all_ids(openai_client) == before
    # The connection is good for more, and so is the limit.
    assert (await http.get("/healthz")).status_code == 200


# contract: 14
async def test_content_is_what_was_uploaded(http: httpx2.AsyncClient) -> None:
    content = b"\n".join([jsonl(chats(1)), random.Random(14).randbytes(300_000)])
    answer = await http.post(
        PATH, content=form(("file", content), ("purpose", b"batch")), headers=FORM
    )
    path = f"{PATH}/{answer.json()['id']}/content"
    for accept in ("application/binary", "application/json", "text/html;q=0.1", None):
        headers = {} if accept is None else {"accept": accept}
        got = await http.get(path, headers=headers)
        assert got.status_code == 200
        assert got.headers["content-type"] == "application/octet-stream"
        assert hashlib.sha256(got.content).digest() == hashlib.sha256(content).digest()


async def test_a_range_a_head_and_a_tag(http: httpx2.AsyncClient) -> None:
    content = jsonl(chats(50))
    answer = await http.post(
        PATH, content=form(("file", content), ("purpose", b"batch")), headers=FORM
    )
    path = f"{PATH}/{answer.json()['id']}/content"
    head = await http.head(path)
    assert head.headers["content-length"] == str(len(content))
    tag = head.headers["etag"]
    part = await http.get(path, headers={"range": "bytes=10-19", "if-range": tag})
    assert (part.status_code, part.content) == (206, content[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(content)}"


# contract: 15
@pytest.mark.parametrize("purpose", ["user_data", "assistants"])
async def test_some_purposes_are_not_given_back(openai_client: AsyncOpenAI, purpose: str) -> None:
    file = await made(openai_client, b"x", purpose)
    with pytest.raises(openai.BadRequestError) as caught:
        await openai_client.files.content(file.id)
    assert f"Not allowed to download files of purpose: {purpose}" in str(caught.value)


# contract: 16, 81
async def test_an_unknown_file(openai_client: AsyncOpenAI) -> None:
    files = openai_client.files
    for ask in (files.retrieve, files.delete, files.content):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(UNKNOWN)
        assert caught.value.param == "id"
        assert UNKNOWN in str(caught.value)


# contract: 17
async def test_delete(openai_client: AsyncOpenAI) -> None:
    files = openai_client.files
    file = await made(openai_client, b"x", "evals")
    deleted = await files.delete(file.id)
    assert deleted.to_dict() == {"id": file.id, "object": "file", "deleted": True}
    for ask in (files.retrieve, files.content, files.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(file.id)
    assert file.id not in await all_ids(openai_client, purpose="evals")


# contract: 19, 23
async def test_fifty_files_page_in_both_orders(openai_client: AsyncOpenAI) -> None:
    fifty = await asyncio.gather(
        *(made(openai_client, b"%d" % number, "fine-tune") for number in range(50))
    )
    # Made so fast that their times tell few of them apart.
    assert len({file.created_at for file in fifty}) < 25
    ids = {file.id for file in fifty}
    down = await all_ids(openai_client, limit=7, purpose="fine-tune")
    up = await all_ids(openai_client, limit=7, purpose="fine-tune", order="asc")
    assert len(down) == len(set(down))
    assert set(down) == ids
    assert up == down[::-1]
    by_default = [file.created_at async for file in openai_client.files.list(purpose="fine-tune")]
    assert by_default == sorted(by_default, reverse=True)


# contract: 20, 69
async def test_the_purpose_filters(openai_client: AsyncOpenAI) -> None:
    await made(openai_client, b"x", "evals")
    done = await ended(
        openai_client, await create(openai_client, await upload(openai_client, chats(1)))
    )
    for purpose in ("evals", "batch", "batch_output"):
        found = [file async for file in openai_client.files.list(purpose=purpose)]
        assert {file.purpose for file in found} == {purpose}
    assert done.output_file_id in {file.id for file in found}
    assert await all_ids(openai_client, purpose="no-such-purpose") == []


# contract: 21
async def test_pages_of_one_visit_every_file_once(openai_client: AsyncOpenAI) -> None:
    made_now = [(await made(openai_client, b"x", "assistants")).id for _ in range(4)]
    seen = await all_ids(openai_client, limit=1, purpose="assistants")
    assert seen[:4] == made_now[::-1]
    assert len(seen) == len(set(seen))


# contract: 22
@pytest.mark.parametrize("limit", [0, 10_001])
async def test_a_limit_out_of_range(openai_client: AsyncOpenAI, limit: int) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await openai_client.files.list(limit=limit)
    code = "integer_below_min_value" if limit == 0 else "integer_above_max_value"
    assert (caught.value.code, caught.value.param) == (code, "limit")
