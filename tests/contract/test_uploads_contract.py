"""The contract of uploads, held to with the official client over a whole running system."""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types import Upload

from protos.nightshift.v1 import uploads_pb2, uploads_pb2_grpc
from services.kit.wire.errors import InvalidRequestError
from services.kit.wire.errors import NotFoundError as NoSuchObject
from tests.kit.batches import chats, check_answers, create, ended, ids, jsonl, outcome
from tests.kit.store import our_errors
from tests.kit.streams import told
from tests.kit.up import RunningUp
from tests.kit.uploads import cut

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

LINES = chats(60, "in parts")
CONTENT = jsonl(LINES)
UPLOAD_KEYS = {
    *("id", "object", "bytes", "created_at", "expires_at", "filename", "purpose", "status", "file"),
}


async def open_upload(client: AsyncOpenAI, size: int, **fields: Any) -> Upload:
    """Open an upload as a user does."""
    values = {"filename": "in.jsonl", "purpose": "batch", "mime_type": "application/jsonl"}
    return await client.uploads.create(bytes=size, **{**values, **fields})


async def send(client: AsyncOpenAI, upload: Upload, pieces: Sequence[bytes]) -> list[str]:
    """Send parts, all at once; return their ids in the order of `pieces`."""
    parts = await asyncio.gather(
        *(client.uploads.parts.create(upload.id, data=piece) for piece in pieces)
    )
    return [part.id for part in parts]


async def no_upload(client: AsyncOpenAI, call: Any, status: str) -> None:
    """Expect the refusal of an upload that has ended."""
    with pytest.raises(BadRequestError, match=status) as error:
        await call
    assert error.value.param == "upload_id"


# contract: 91
async def test_a_file_sent_in_chunks_runs_as_a_batch(
    openai_client: AsyncOpenAI, tmp_path: Path
) -> None:
    path = tmp_path / "in parts.jsonl"
    path.write_bytes(CONTENT)
    done = await openai_client.uploads.upload_file_chunked(
        file=path,
        mime_type="application/jsonl",
        purpose="batch",
        part_size=997,
        md5=hashlib.md5(CONTENT).hexdigest(),
    )
    assert done.status == "completed"
    assert done.file is not None
    assert (done.file.bytes, done.file.filename) == (len(CONTENT), "in parts.jsonl")
    assert await openai_client.files.retrieve(done.file.id) == done.file
    assert (await openai_client.files.content(done.file.id)).content == CONTENT

    batch = await ended(openai_client, await create(openai_client, done.file.id))

    assert batch.status == "completed"
    found = await outcome(openai_client, batch, ids(LINES))
    assert found.counts == (60, 60, 0)
    check_answers(found, LINES)


# contract: 92
async def test_parts_go_in_parallel_and_in_any_order(openai_client: AsyncOpenAI) -> None:
    pieces = cut(CONTENT, 16)
    shuffled = list(range(16))
    random.Random(5).shuffle(shuffled)
    upload = await open_upload(openai_client, len(CONTENT))
    sent = await send(openai_client, upload, [pieces[number] for number in shuffled])
    in_order = [sent[shuffled.index(number)] for number in range(16)]

    done = await openai_client.uploads.complete(upload.id, part_ids=in_order)

    assert done.file is not None
    assert (await openai_client.files.content(done.file.id)).content == CONTENT
    batch = await ended(openai_client, await create(openai_client, done.file.id))
    assert (await outcome(openai_client, batch, ids(LINES))).counts == (60, 60, 0)


# contract: 93
async def test_sizes_and_md5_are_checked(openai_client: AsyncOpenAI) -> None:
    one, two = cut(CONTENT, 2)
    upload = await open_upload(openai_client, len(CONTENT))
    first, second = await send(openai_client, upload, [one, two])
    md5 = hashlib.md5(CONTENT).hexdigest()
    complete = openai_client.uploads.complete

    with pytest.raises(BadRequestError, match=str(len(CONTENT))) as error:
        await complete(upload.id, part_ids=[first])
    assert error.value.param == "part_ids"
    with pytest.raises(BadRequestError, match="MD5") as error:
        await complete(upload.id, part_ids=[first, second], md5="0" * 32)
    assert error.value.param == "md5"
    with pytest.raises(BadRequestError, match="MD5"):
        await complete(upload.id, part_ids=[second, first], md5=md5)
    for part_ids in ([first, first], [first, "part_none"]):
        with pytest.raises(BadRequestError) as error:
            await complete(upload.id, part_ids=part_ids)
        assert error.value.param == "part_ids"

    done = await complete(upload.id, part_ids=[first, second], md5=md5)
    assert done.status == "completed"
    assert await complete(upload.id, part_ids=[first, second], md5=md5) == done


# contract: 94
async def test_an_ended_upload_takes_nothing_and_an_unknown_one_is_not_found(
    openai_client: AsyncOpenAI,
) -> None:
    uploads = openai_client.uploads
    cancelled = await open_upload(openai_client, 4, purpose="user_data")
    parts = await send(openai_client, cancelled, [b"1234"])
    answer = await uploads.cancel(cancelled.id)
    assert (answer.status, answer.file) == ("cancelled", None)
    await no_upload(openai_client, uploads.parts.create(cancelled.id, data=b"1234"), "cancelled")
    await no_upload(openai_client, uploads.complete(cancelled.id, part_ids=parts), "cancelled")
    await no_upload(openai_client, uploads.cancel(cancelled.id), "cancelled")
    completed = await open_upload(openai_client, 4, purpose="user_data")
    await uploads.complete(completed.id, part_ids=await send(openai_client, completed, [b"1234"]))
    await no_upload(openai_client, uploads.parts.create(completed.id, data=b"1234"), "completed")
    await no_upload(openai_client, uploads.complete(completed.id, part_ids=[]), "completed")
    await no_upload(openai_client, uploads.cancel(completed.id), "completed")
    for upload_id in ("upload_none", "no such/id"):
        for call in (
            uploads.parts.create(upload_id, data=b"1234"),
            uploads.complete(upload_id, part_ids=[]),
            uploads.cancel(upload_id),
        ):
            with pytest.raises(NotFoundError) as error:
                await call
            if upload_id == "upload_none":
                assert error.value.param == "upload_id"
                assert "No such Upload object: upload_none" in error.value.message


# contract: 95
async def test_objects_have_every_key(openai_client: AsyncOpenAI) -> None:
    upload = await open_upload(
        openai_client,
        4,
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    wire = upload.to_dict()
    assert wire.keys() == UPLOAD_KEYS
    assert (upload.object, upload.status, upload.file) == ("upload", "pending", None)
    assert (upload.bytes, upload.filename, upload.purpose) == (4, "in.jsonl", "user_data")
    assert upload.expires_at - upload.created_at == 3600
    part = await openai_client.uploads.parts.create(upload.id, data=b"1234")
    assert part.id.startswith("part_")
    assert part.to_dict() == {
        "id": part.id,
        "object": "upload.part",
        "created_at": part.created_at,
        "upload_id": upload.id,
    }
    done = await openai_client.uploads.complete(upload.id, part_ids=[part.id])
    assert done.to_dict().keys() == UPLOAD_KEYS
    file = done.file
    assert file is not None
    assert file.to_dict().keys() == {
        *("id", "object", "bytes", "created_at", "expires_at", "filename", "purpose", "status"),
        "status_details",
    }
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 3600


async def test_an_empty_file_in_chunks(openai_client: AsyncOpenAI) -> None:
    how: Any = {"file": b"", "filename": "empty", "bytes": 0, "mime_type": "text/plain"}
    done = await openai_client.uploads.upload_file_chunked(purpose="user_data", **how)
    assert (done.status, done.file and done.file.bytes) == ("completed", 0)
    with pytest.raises(BadRequestError, match="empty"):
        await openai_client.uploads.upload_file_chunked(purpose="batch", **how)


async def test_of_two_completions_at_once_one_file_comes(openai_client: AsyncOpenAI) -> None:
    before = [file.id async for file in openai_client.files.list(purpose="batch")]
    upload = await open_upload(openai_client, len(CONTENT))
    parts = await send(openai_client, upload, cut(CONTENT, 3))
    same = await asyncio.gather(
        *(openai_client.uploads.complete(upload.id, part_ids=parts) for _ in range(4))
    )
    assert all(done == same[0] for done in same)
    after = [file.id async for file in openai_client.files.list(purpose="batch")]
    assert same[0].file is not None
    assert set(after) - set(before) == {same[0].file.id}


@pytest.mark.parametrize(
    ("changed", "code", "param"),
    [
        ({"filename": None}, "missing_required_parameter", "filename"),
        ({"purpose": None}, "missing_required_parameter", "purpose"),
        ({"bytes": None}, "missing_required_parameter", "bytes"),
        ({"mime_type": None}, "missing_required_parameter", "mime_type"),
        ({"filename": 1}, "invalid_type", "filename"),
        ({"filename": ""}, "empty_string", "filename"),
        ({"filename": "a\0b"}, "invalid_value", "filename"),
        ({"bytes": "4"}, "invalid_type", "bytes"),
        ({"bytes": True}, "invalid_type", "bytes"),
        ({"bytes": 4.0}, "invalid_type", "bytes"),
        ({"bytes": -1}, "integer_below_min_value", "bytes"),
        ({"bytes": 2**63}, "integer_above_max_value", "bytes"),
        ({"bytes": 200 * 2**20 + 1}, "integer_above_max_value", "bytes"),
        ({"bytes": 8 * 2**30 + 1, "purpose": "vision"}, "integer_above_max_value", "bytes"),
        ({"purpose": "bogus"}, None, "purpose"),
        ({"purpose": []}, "invalid_type", "purpose"),
        ({"colour": 1}, "unknown_parameter", "colour"),
        ({"expires_after": {"anchor": "now", "seconds": 3600}}, "invalid_value", None),
        ({"expires_after": {"anchor": "created_at"}}, "missing_required_parameter", None),
        ({"expires_after": 3600}, "invalid_type", "expires_after"),
    ],
)
async def test_what_is_created_must_fit(
    openai_client: AsyncOpenAI, changed: dict[str, Any], code: str | None, param: str | None
) -> None:
    body: dict[str, Any] = {
        "filename": "f",
        "purpose": "batch",
        "bytes": 4,
        "mime_type": "text/plain",
        **changed,
    }
    body = {name: value for name, value in body.items() if value is not None}
    with pytest.raises(BadRequestError) as error:
        await openai_client.post("/uploads", body=body, cast_to=Upload)
    assert error.value.code == code
    assert param is None or error.value.param == param
    assert error.value.type == "invalid_request_error"


async def test_what_is_completed_must_fit(openai_client: AsyncOpenAI) -> None:
    upload = await open_upload(openai_client, 0, purpose="user_data")
    path = f"/uploads/{upload.id}/complete"
    for body, code, param in (
        ({}, "missing_required_parameter", "part_ids"),
        ({"part_ids": "part_1"}, "invalid_type", "part_ids"),
        ({"part_ids": [1]}, "invalid_type", "part_ids[0]"),
        ({"part_ids": [], "md5": 1}, "invalid_type", "md5"),
        ({"part_ids": [], "md5": "xyz"}, "invalid_value", "md5"),
        ({"part_ids": [], "sha": "xyz"}, "unknown_parameter", "sha"),
    ):
        with pytest.raises(BadRequestError) as error:
            await openai_client.post(path, body=body, cast_to=Upload)
        assert (error.value.code, error.value.param) == (code, param)
    done = await openai_client.post(path, body={"part_ids": [], "md5": None}, cast_to=Upload)
    assert done.status == "completed"


async def test_forms_that_hold_no_part(system: RunningUp, openai_client: AsyncOpenAI) -> None:
    upload = await open_upload(openai_client, 4, purpose="user_data")
    path = f"/uploads/{upload.id}/parts"
    async with httpx2.AsyncClient(base_url=system.base_url, timeout=20) as http:
        for files, says in (
            ({"file": ("f", b"1234")}, "'data' is a required property"),
            ({"data": (None, b"1234")}, "-F data=@FILE"),
            ([("data", ("a", b"12")), ("data", ("b", b"34"))], "one 'data'"),
            ({"data": ("f", b"12345")}, "4 bytes"),
        ):
            answer = await http.post(path, files=files)
            assert answer.status_code == 400
            assert says in answer.json()["error"]["message"]
        answer = await http.post(path, content=b"1234")
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_content_type"
        # Nothing of all that counts, and the same connection still serves.
        answer = await http.post(path, files={"data": ("f", b"1234")}, data={"other": "field"})
        assert answer.status_code == 200
        completing = await http.post(
            f"/uploads/{upload.id}/complete", json={"part_ids": [answer.json()["id"]]}
        )
        assert completing.json()["file"]["bytes"] == 4


async def test_a_large_part_is_refused_at_its_limit(openai_client: AsyncOpenAI) -> None:
    upload = await open_upload(openai_client, 128 << 20, purpose="user_data")
    with pytest.raises(BadRequestError, match="67108864") as error:
        await openai_client.uploads.parts.create(upload.id, data=bytes((64 << 20) + 1))
    assert error.value.param == "data"
    largest = await openai_client.uploads.parts.create(upload.id, data=bytes(64 << 20))
    assert largest.upload_id == upload.id


async def test_grpc_clients_do_the_same(system: RunningUp, openai_client: AsyncOpenAI) -> None:
    async with grpc.aio.insecure_channel(system.grpc) as channel:
        uploads: Any = uploads_pb2_grpc.UploadsStub(channel)
        wanted = uploads_pb2.CreateUploadRequest(
            filename="in.jsonl", purpose="batch", bytes=len(CONTENT)
        )
        upload = (await uploads.CreateUpload(wanted)).upload
        messages = uploads_pb2.AddUploadPartRequest

        async def add(piece: bytes, upload_id: str = upload.id) -> str:
            frames = [
                messages(header=uploads_pb2.UploadPartHeader(upload_id=upload_id)),
                messages(data=piece),
                messages(footer=uploads_pb2.UploadPartFooter()),
            ]
            with our_errors():
                return str((await told(uploads.AddUploadPart(iter(frames)))).part.id)

        parts = [await add(piece) for piece in cut(CONTENT, 3)]
        request = uploads_pb2.CompleteUploadRequest(upload_id=upload.id, part_ids=parts)
        done = (await uploads.CompleteUpload(request)).upload
        assert done.status == uploads_pb2.UPLOAD_STATUS_COMPLETED
        assert (await openai_client.files.content(done.file.id)).content == CONTENT
        with pytest.raises(InvalidRequestError, match="completed"):
            await add(b"late")
        with pytest.raises(NoSuchObject):
            await add(b"x", "upload_none")
        with pytest.raises(NoSuchObject):
            await add(b"x", "no/id")
        wanted.purpose = "bogus"
        with pytest.raises(InvalidRequestError, match="bogus"), our_errors():
            await uploads.CreateUpload(wanted)
        headless = [messages(data=b"x"), messages(footer=uploads_pb2.UploadPartFooter())]
        with pytest.raises(InvalidRequestError, match="header"), our_errors():
            await told(uploads.AddUploadPart(iter(headless)))
        endless = [messages(header=uploads_pb2.UploadPartHeader(upload_id=upload.id))]
        with pytest.raises(InvalidRequestError), our_errors():
            await told(uploads.AddUploadPart(iter(endless)))
        with pytest.raises(InvalidRequestError, match="completed"), our_errors():
            await uploads.CancelUpload(uploads_pb2.CancelUploadRequest(upload_id=upload.id))


async def test_the_synchronous_client_too(system: RunningUp) -> None:
    def upload() -> bytes:
        with openai.OpenAI(base_url=system.base_url, api_key="anything") as client:
            done = client.uploads.upload_file_chunked(
                file=CONTENT,
                filename="in.jsonl",
                bytes=len(CONTENT),
                mime_type="application/jsonl",
                purpose="batch",
                part_size=10_000,
            )
            assert done.file is not None
            return client.files.content(done.file.id).content

    assert await asyncio.to_thread(upload) == CONTENT
