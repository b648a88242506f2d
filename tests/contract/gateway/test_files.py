"""Files, as the official client and raw HTTP see them."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from protos.nightshift.v1 import files_pb2
from services.gateway.main import Listening
from services.kit.wire.errors import InvalidRequestError, NotFoundError, TooLargeError
from services.kit.wire.frames import FRAME_BYTES
from tests.kit.eventually import eventually
from tests.kit.public_store import CREATED_AT, ScriptedStore, file_id, make_file

pytestmark = pytest.mark.asyncio(loop_scope="session")

LINE = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{}}\n'
PURPOSES = ["fine-tune", "assistants", "batch", "user_data", "vision", "evals"]
GONE = ("cancelled", "broken off")
"""How the store sees a cancelled upload: its handler is cancelled, or its stream ends early."""

BOUNDARY = "----a-b"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def part(name: str, value: bytes, filename: bytes | None = None) -> bytes:
    """Return one part of a form as raw bytes."""
    tail = b"" if filename is None else b'; filename="' + filename + b'"'
    head = b'Content-Disposition: form-data; name="' + name.encode() + b'"' + tail
    return b"--" + BOUNDARY.encode() + b"\r\n" + head + b"\r\n\r\n" + value + b"\r\n"


def form(*parts: bytes, end: bool = True) -> bytes:
    """Return a whole form."""
    return b"".join(parts) + (f"--{BOUNDARY}--\r\n".encode() if end else b"")


FILE = part("file", LINE, b"in.jsonl")
PURPOSE = part("purpose", b"batch")


async def pieces(body: bytes, size: int) -> AsyncIterator[bytes]:
    """Yield a body in pieces, so that it is sent without a length."""
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def test_upload_returns_all_nine_keys(client: AsyncOpenAI, store: ScriptedStore) -> None:
    raw = await client.files.with_raw_response.create(file=("in.jsonl", LINE), purpose="batch")
    assert raw.status_code == 200
    assert raw.http_response.json() == {
        "id": file_id(),
        "object": "file",
        "bytes": len(LINE),
        "created_at": CREATED_AT,
        "expires_at": None,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }
    upload = store.uploads[0]
    assert bytes(upload.content) == LINE
    assert upload.outcome == "finished"
    assert upload.metadata["x-nightshift-project"] == "default"
    assert upload.metadata["x-request-id"] == raw.headers["x-request-id"]


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
@pytest.mark.parametrize("order", [(FILE, PURPOSE), (PURPOSE, FILE)], ids=["node", "python"])
async def test_parts_in_any_order_without_length(
    http: httpx2.AsyncClient, store: ScriptedStore, order: tuple[bytes, bytes], size: int
) -> None:
    answer = await http.post("/v1/files", content=pieces(form(*order), size), headers=FORM)
    assert answer.status_code == 200, answer.text
    assert answer.json()["purpose"] == "batch"
    upload = store.uploads[0]
    assert bytes(upload.content) == LINE
    assert upload.header is not None
    assert not upload.header.HasField("declared_bytes")


@pytest.mark.parametrize(
    "name", ["a b é.jsonl", "upload", "日本.txt", 'we"ird.jsonl', "back\\slash", "x%20y", ".."]
)
async def test_filename_comes_back_unchanged(client: AsyncOpenAI, name: str) -> None:
    file = await client.files.create(file=(name, LINE), purpose="batch")
    assert file.filename == name


async def test_expiry_travels_as_text(client: AsyncOpenAI, store: ScriptedStore) -> None:
    file = await client.files.create(
        file=LINE, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == CREATED_AT + 3600
    footer = store.uploads[0].footer
    assert footer is not None
    assert footer.expires_after.anchor == "created_at"


ANCHOR = part("expires_after[anchor]", b"created_at")


def seconds(value: bytes) -> bytes:
    """Return the expiry's seconds as a part."""
    return part("expires_after[seconds]", value)


BAD_FORMS: dict[str, tuple[bytes, str, str | None, str | None]] = {
    "no file": (form(PURPOSE), "'file' is a required property", None, None),
    "no purpose": (form(FILE), "'purpose' is a required property", None, None),
    "nothing": (form(), "'file' is a required property", None, None),
    "no body": (b"", "closing boundary", None, None),
    "purpose last": (
        form(FILE, part("purpose", b"bogus")),
        f"'bogus' is not one of {PURPOSES} - 'purpose'",
        None,
        "purpose",
    ),
    "purpose first": (form(part("purpose", b"bogus"), FILE), "'bogus' is not", None, "purpose"),
    "two files": (form(FILE, FILE, PURPOSE), "one 'file'", None, None),
    "two purposes": (form(PURPOSE, PURPOSE, FILE), "'purpose' twice", None, None),
    "file as text": (form(part("file", LINE), PURPOSE), "no filename", None, None),
    "empty filename": (form(part("file", LINE, b""), PURPOSE), "filename", None, None),
    "not ended": (form(FILE, PURPOSE, end=False), "closing boundary", None, None),
    "no form": (b"{}", "HINT: let your HTTP library make", None, None),
    "long field": (form(part("purpose", b"x" * 5000), FILE), "longer than 4096", None, None),
    "field not text": (form(part("purpose", b"\xff"), FILE), "not UTF-8", None, None),
    "many parts": (form(*[part("x", b"")] * 100, FILE, PURPOSE), "more than 64", None, None),
    "half an expiry": (
        form(ANCHOR, FILE, PURPOSE),
        "Missing required parameter: 'expires_after.seconds'.",
        "missing_required_parameter",
        "expires_after.seconds",
    ),
    "the other half": (
        form(seconds(b"3600"), FILE, PURPOSE),
        "'expires_after.anchor'",
        "missing_required_parameter",
        "expires_after.anchor",
    ),
    "too short": (
        form(ANCHOR, seconds(b"3599"), FILE, PURPOSE),
        "Expected a value >= 3600, but got 3599 instead.",
        "integer_below_min_value",
        "expires_after.seconds",
    ),
    "too long": (
        form(ANCHOR, seconds(b"2592001"), FILE, PURPOSE),
        "Expected a value <= 2592000",
        "integer_above_max_value",
        "expires_after.seconds",
    ),
    "far too long": (
        form(ANCHOR, seconds(b"9" * 60), FILE, PURPOSE),
        "Expected a value <= 2592000",
        "integer_above_max_value",
        "expires_after.seconds",
    ),
    "no number": (
        form(ANCHOR, seconds("٣٦٠٠".encode()), FILE, PURPOSE),
        "expected an integer",
        "invalid_type",
        "expires_after.seconds",
    ),
    "other anchor": (
        form(part("expires_after[anchor]", b"now"), seconds(b"3600"), FILE, PURPOSE),
        "Supported values are: 'created_at'.",
        "invalid_value",
        "expires_after.anchor",
    ),
    "misspelt expiry": (
        form(FILE, PURPOSE, part("expires_after[second]", b"3600")),
        "Unknown parameter",
        "unknown_parameter",
        "expires_after[second]",
    ),
}


@pytest.mark.parametrize("case", BAD_FORMS)
async def test_bad_form_is_refused_and_leaves_nothing(
    http: httpx2.AsyncClient, store: ScriptedStore, case: str
) -> None:
    body, text, code, param = BAD_FORMS[case]
    answer = await http.post("/v1/files", content=body, headers=FORM)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert text in error["message"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)
    await eventually(lambda: all(upload.outcome in GONE for upload in store.uploads))


async def test_unknown_fields_are_ignored(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    body = form(part("x", b"1"), part("y", b"22", b"other.bin"), FILE, PURPOSE)
    answer = await http.post("/v1/files", content=body, headers=FORM)
    assert answer.status_code == 200
    assert bytes(store.uploads[0].content) == LINE


@pytest.mark.parametrize(
    "kind", ["application/json", "", "multipart/form-data", "multipart/form-data; boundary="]
)
async def test_other_content_types_are_refused(http: httpx2.AsyncClient, kind: str) -> None:
    answer = await http.post(
        "/v1/files", content=form(FILE, PURPOSE), headers={"content-type": kind}
    )
    assert answer.status_code == 400
    assert "boundary" in answer.json()["error"]["message"] or "multipart/form-data" in answer.text


async def test_compressed_body_is_refused(http: httpx2.AsyncClient) -> None:
    headers = {**FORM, "content-encoding": "gzip"}
    answer = await http.post("/v1/files", content=form(FILE, PURPOSE), headers=headers)
    assert answer.status_code == 415
    assert "gzip" in answer.json()["error"]["message"]


async def test_large_upload_travels_in_full_frames(
    client: AsyncOpenAI, store: ScriptedStore
) -> None:
    content = hashlib.sha256(b"seed").digest() * 32 * 1024 * 9  # 9 MiB
    file = await client.files.create(file=("big", content), purpose="user_data")
    upload = store.uploads[0]
    assert file.bytes == len(content)
    assert bytes(upload.content) == content
    assert max(upload.frames) <= FRAME_BYTES
    assert len(upload.frames) <= len(content) // FRAME_BYTES + 1
    assert upload.header is not None
    declared = upload.header.declared_bytes
    assert len(content) - 32 * 1024 < declared <= len(content)


async def test_store_refuses_half_way(client: AsyncOpenAI, store: ScriptedStore) -> None:
    store.refuse_upload_after = (2, TooLargeError("too many bytes", param="file"))
    with pytest.raises(openai.APIStatusError) as caught:
        await client.files.create(file=b"x" * 30_000_000, purpose="batch")
    assert caught.value.status_code == 413
    assert caught.value.body == {
        "message": "too many bytes",
        "type": "invalid_request_error",
        "param": "file",
        "code": None,
    }
    assert len(store.uploads) == 1
    # The connection that the refused bytes came over is good for more.
    store.refuse_upload_after = None
    assert (await client.files.create(file=LINE, purpose="batch")).bytes == len(LINE)


async def test_early_refusal_of_a_large_upload(client: AsyncOpenAI, store: ScriptedStore) -> None:
    with pytest.raises(openai.BadRequestError, match="'bogus' is not one of"):
        await client.files.create(file=b"x" * 30_000_000, purpose="bogus")  # type: ignore[arg-type]
    assert store.uploads == []
    assert (await client.files.create(file=LINE, purpose="batch")).bytes == len(LINE)


async def test_store_judges_the_content(client: AsyncOpenAI, store: ScriptedStore) -> None:
    refusal = InvalidRequestError("Invalid file for Batch API. Must be utf-8 encoded")
    store.refuse_upload_after = (0, refusal)
    with pytest.raises(openai.BadRequestError, match="utf-8"):
        await client.files.create(file=b"\xff\xfe", purpose="batch")


async def test_client_that_goes_away_leaves_nothing(
    gateway: Listening, store: ScriptedStore
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http_port)
    head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: {FORM['content-type']}\r\n"
    writer.write(f"{head}content-length: 9000000\r\n\r\n".encode())
    writer.write(part("file", b"x" * 3_000_000, b"a")[:-2])
    await writer.drain()
    await eventually(lambda: store.uploads and store.uploads[0].frames)
    writer.transport.abort()
    await eventually(lambda: store.uploads[0].outcome in GONE)
    assert not reader.at_eof() or await reader.read() == b""
    assert store.files == {}


async def test_client_that_falls_silent_is_given_up(
    gateway: Listening, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.rest.pace.IDLE_SECONDS", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http_port)
    head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: {FORM['content-type']}\r\n"
    writer.write(f"{head}content-length: 9000000\r\n\r\n".encode() + FILE)
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    writer.transport.abort()
    assert b" 400 " in answer
    await eventually(lambda: store.uploads[0].outcome in GONE)


async def test_list_pages_itself(client: AsyncOpenAI, store: ScriptedStore) -> None:
    files = [make_file(number) for number in (3, 2, 1)]
    store.script(
        "ListFiles",
        *(
            files_pb2.ListFilesResponse(files=[file], has_more=index < 2)
            for index, file in enumerate(files)
        ),
    )
    seen = [file.id async for file in client.files.list(limit=1, purpose="batch", order="asc")]
    assert seen == [file.id for file in files]
    requests = store.requests("ListFiles")
    assert [request.page.after for request in requests] == ["", seen[0], seen[1]]
    assert all(request.ascending and request.purpose == "batch" for request in requests)


async def test_list_object(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    store.script(
        "ListFiles",
        files_pb2.ListFilesResponse(),
        files_pb2.ListFilesResponse(files=[make_file(2), make_file(1)]),
    )
    empty = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert (await http.get("/v1/files")).json() == empty
    listed = (await http.get("/v1/files?limit=2&order=desc&api-version=1")).json()
    assert (listed["first_id"], listed["last_id"]) == (file_id(2), file_id(1))
    assert [request.page.limit for request in store.requests("ListFiles")] == [500, 2]


async def test_long_list_is_gathered_in_bounded_answers(
    http: httpx2.AsyncClient, store: ScriptedStore
) -> None:
    pages = [
        files_pb2.ListFilesResponse(
            files=[make_file(1000 * page + number) for number in range(count)], has_more=page < 2
        )
        for page, count in enumerate((500, 500, 20))
    ]
    store.script("ListFiles", *pages)
    listed = (await http.get("/v1/files")).json()
    assert len(listed["data"]) == 1020
    assert listed["has_more"] is False


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("limit=0", "integer_below_min_value", "limit"),
        ("limit=-1", "integer_below_min_value", "limit"),
        ("limit=10001", "integer_above_max_value", "limit"),
        ("limit=ten", "invalid_type", "limit"),
        ("limit=1.5", "invalid_type", "limit"),
        (f"limit={'9' * 400}", "integer_above_max_value", "limit"),
        ("order=up", "invalid_value", "order"),
    ],
)
async def test_bad_list_query(http: httpx2.AsyncClient, query: str, code: str, param: str) -> None:
    answer = await http.get(f"/v1/files?{query}")
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, param)


@pytest.mark.parametrize("wrong", ["file-none", "a%20b", "..%2e", "%00", "é"])
async def test_unknown_file(http: httpx2.AsyncClient, store: ScriptedStore, wrong: str) -> None:
    if wrong == "file-none":
        unknown = NotFoundError("No such File object: file-none", param="id")
        store.script("GetFile", unknown)
        store.script("DeleteFile", unknown)
        store.script("ListFiles", NotFoundError("No such File object: file-none", param="after"))
    for method, path in (
        ("GET", f"/v1/files/{wrong}"),
        ("DELETE", f"/v1/files/{wrong}"),
        ("GET", f"/v1/files/{wrong}/content"),
        ("GET", f"/v1/files?after={wrong}"),
    ):
        answer = await http.request(method, path)
        assert answer.status_code == 404, path
        error = answer.json()["error"]
        assert error["message"].startswith("No such File object: ")
        assert error["param"] == ("after" if "after=" in path else "id")


async def test_delete(client: AsyncOpenAI, store: ScriptedStore) -> None:
    store.script("DeleteFile", files_pb2.DeleteFileResponse(file_id=file_id()))
    deleted = await client.files.delete(file_id())
    assert deleted.to_dict() == {"id": file_id(), "object": "file", "deleted": True}


async def test_many_uploads_at_once(client: AsyncOpenAI, store: ScriptedStore) -> None:
    async def one(number: int) -> Any:
        return await client.files.create(file=(f"{number}", b"%d\n" % number), purpose="batch")

    files = await asyncio.gather(*(one(number) for number in range(20)))
    assert sorted(int(file.filename) for file in files) == list(range(20))
    assert all(
        upload.header is not None
        and bytes(upload.content) == f"{upload.header.filename}\n".encode()
        for upload in store.uploads
    )
