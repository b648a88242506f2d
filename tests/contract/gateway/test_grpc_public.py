"""The public gRPC services: the same answers, checks, ids and errors as REST has."""

from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from protos.nightshift.v1 import (
    batches_pb2,
    batches_pb2_grpc,
    common_pb2,
    files_pb2,
    files_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)
from services.kit.calls import rpc
from services.kit.wire.errors import (
    ConflictError,
    InvalidRequestError,
    NightshiftError,
    NotFoundError,
    from_rpc_error,
)
from services.kit.wire.frames import FRAME_BYTES
from tests.kit.eventually import eventually
from tests.kit.public_store import DAY_SECONDS, ScriptedStore, batch_id, file_id, make_batch
from tests.kit.streams import told

pytestmark = pytest.mark.asyncio(loop_scope="session")

Frame = files_pb2.UploadFileRequest


def header(name: str = "in.jsonl") -> Frame:
    """Return a header frame."""
    return Frame(header=files_pb2.UploadFileHeader(filename=name))


def footer(**fields: Any) -> Frame:
    """Return a footer frame, of purpose batch unless `fields` say otherwise."""
    return Frame(footer=files_pb2.UploadFileFooter(**{"purpose": "batch", **fields}))


async def stream(frames: Iterable[Frame]) -> AsyncIterator[Frame]:
    """Yield frames."""
    for frame in frames:
        yield frame


async def failure(call: Any) -> NightshiftError:
    """Return what a call that must fail is refused with; it carries a request id."""
    with pytest.raises(rpc.CallFault) as caught:
        await told(call)
    assert request_id(await call.trailing_metadata())
    return from_rpc_error(caught.value)


def request_id(metadata: Any) -> str:
    """Return the request id of trailing metadata."""
    value = dict(metadata)["x-request-id"]
    assert value.startswith("req_")
    return str(value)


async def test_upload_and_download(channel: grpc.aio.Channel, store: ScriptedStore) -> None:
    files = files_pb2_grpc.FilesStub(channel)
    frames = [header("é"), Frame(data=b"a" * FRAME_BYTES), Frame(data=b"b"), footer()]
    call = files.UploadFile(stream(frames), metadata=(("authorization", "Bearer x"),))
    answer = await call
    assert (answer.file.filename, answer.file.bytes) == ("é", FRAME_BYTES + 1)
    upload = store.uploads[0]
    assert upload.metadata["x-nightshift-project"] == "default"
    assert upload.metadata["x-request-id"] == request_id(await call.trailing_metadata())
    assert "authorization" not in upload.metadata
    read = files.ReadFile(files_pb2.ReadFileRequest(file_id=answer.file.id, offset=FRAME_BYTES))
    got = [frame async for frame in read]
    assert got[0].file == answer.file
    assert b"".join(frame.data for frame in got) == b"b"


BAD_UPLOADS: dict[str, tuple[list[Frame], str]] = {
    "nothing": ([], "first frame"),
    "no header": ([Frame(data=b"x")], "first frame"),
    "no name": ([header(""), footer()], "filename"),
    "two headers": ([header(), header()], "one footer"),
    "large frame": ([header(), Frame(data=b"x" * (FRAME_BYTES + 1))], "at most 1048576"),
    "no footer": ([header(), Frame(data=b"x")], "without its footer"),
    "no purpose": (
        [header(), Frame(footer=files_pb2.UploadFileFooter())],
        "'purpose' is a required property",
    ),
    "bad purpose": ([header(), footer(purpose="bogus")], "'bogus' is not one of"),
    "bad expiry": (
        [
            header(),
            footer(expires_after=files_pb2.ExpiresAfter(anchor="created_at", seconds=1)),
        ],
        ">= 3600",
    ),
}


@pytest.mark.parametrize("case", BAD_UPLOADS)
async def test_bad_upload_leaves_nothing(
    channel: grpc.aio.Channel, store: ScriptedStore, case: str
) -> None:
    frames, text = BAD_UPLOADS[case]
    error = await failure(files_pb2_grpc.FilesStub(channel).UploadFile(stream(frames)))
    assert isinstance(error, InvalidRequestError)
    assert text in error.message
    await eventually(
        lambda: all(upload.outcome in ("cancelled", "broken off") for upload in store.uploads)
    )


async def test_cancelled_upload_leaves_nothing(
    channel: grpc.aio.Channel, store: ScriptedStore
) -> None:
    call = files_pb2_grpc.FilesStub(channel).UploadFile()
    await call.write(header())
    await call.write(Frame(data=b"x"))
    await eventually(lambda: store.uploads and store.uploads[0].frames)
    call.cancel()
    await eventually(lambda: store.uploads[0].outcome in ("cancelled", "broken off"))


async def test_cancelled_download_ends_the_read(
    channel: grpc.aio.Channel, store: ScriptedStore
) -> None:
    store.add_file(bytes(64 * 1024 * 1024))
    call = files_pb2_grpc.FilesStub(channel).ReadFile(files_pb2.ReadFileRequest(file_id=file_id()))
    await call.read()
    assert store.reads_open() == 1
    call.cancel()
    await eventually(lambda: store.reads_open() == 0)


async def test_user_data_is_not_given_back(channel: grpc.aio.Channel, store: ScriptedStore) -> None:
    store.add_file(b"x", purpose="user_data")
    call = files_pb2_grpc.FilesStub(channel).ReadFile(files_pb2.ReadFileRequest(file_id=file_id()))
    with pytest.raises(rpc.CallFault) as caught:
        await call.read()
    assert "Not allowed to download" in from_rpc_error(caught.value).message


def create(**fields: Any) -> batches_pb2.CreateBatchRequest:
    """Return a good request, changed by `fields`."""
    values: dict[str, Any] = {
        "input_file_id": file_id(),
        "endpoint": "/v1/embeddings",
        "completion_window": "10s",
    }
    return batches_pb2.CreateBatchRequest(**{**values, **fields})


async def test_create_sets_the_window_itself(
    channel: grpc.aio.Channel, store: ScriptedStore
) -> None:
    store.script("CreateBatch", batches_pb2.CreateBatchResponse(batch=make_batch()))
    wanted = create(completion_window_seconds=7 * DAY_SECONDS, metadata={"a": "b"})
    answer = await batches_pb2_grpc.BatchesStub(channel).CreateBatch(wanted)
    assert answer.batch.id == batch_id()
    passed = store.requests("CreateBatch")[0]
    assert (passed.completion_window_seconds, passed.has_metadata) == (10, True)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input_file_id": ""}, "empty_string", "input_file_id"),
        ({"endpoint": ""}, "invalid_value", "endpoint"),
        ({"completion_window": "1h"}, "invalid_value", "completion_window"),
        ({"metadata": {"k": "v" * 513}}, "string_above_max_length", "metadata.k"),
        (
            {"output_expires_after": files_pb2.ExpiresAfter(anchor="created_at", seconds=1)},
            "integer_below_min_value",
            "output_expires_after.seconds",
        ),
    ],
)
async def test_bad_parameters(
    channel: grpc.aio.Channel, store: ScriptedStore, fields: dict[str, Any], code: str, param: str
) -> None:
    error = await failure(batches_pb2_grpc.BatchesStub(channel).CreateBatch(create(**fields)))
    assert (error.code, error.param, error.http_status) == (code, param, 400)
    assert store.calls == []


async def test_errors_arrive_with_their_details(
    channel: grpc.aio.Channel, store: ScriptedStore
) -> None:
    store.script("CancelBatch", ConflictError("Cannot cancel a batch with status 'completed'."))
    batches = batches_pb2_grpc.BatchesStub(channel)
    call = batches.CancelBatch(batches_pb2.CancelBatchRequest(batch_id=batch_id()))
    error = await failure(call)
    assert isinstance(error, ConflictError)
    assert error.message == "Cannot cancel a batch with status 'completed'."
    assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION


def page(after: str = "", limit: int = 0) -> common_pb2.PageRequest:
    """Return a page request."""
    return common_pb2.PageRequest(after=after, limit=limit)


@pytest.mark.parametrize(
    ("method", "request_", "kind"),
    [
        ("GetFile", files_pb2.GetFileRequest(file_id="a b"), NotFoundError),
        ("DeleteFile", files_pb2.DeleteFileRequest(file_id=""), NotFoundError),
        ("ListFiles", files_pb2.ListFilesRequest(page=page("é")), NotFoundError),
        ("ListFiles", files_pb2.ListFilesRequest(page=page(limit=10_001)), InvalidRequestError),
        ("ListFiles", files_pb2.ListFilesRequest(page=page(limit=-1)), InvalidRequestError),
        ("GetBatch", batches_pb2.GetBatchRequest(batch_id="../x"), NotFoundError),
        ("CancelBatch", batches_pb2.CancelBatchRequest(), NotFoundError),
        ("ListBatches", batches_pb2.ListBatchesRequest(page=page(limit=101)), InvalidRequestError),
        ("ListBatches", batches_pb2.ListBatchesRequest(page=page("\0")), NotFoundError),
    ],
)
async def test_what_cannot_be_is_not_asked_of_the_store(
    channel: grpc.aio.Channel,
    store: ScriptedStore,
    method: str,
    request_: Message,
    kind: type[NightshiftError],
) -> None:
    stubs = (files_pb2_grpc.FilesStub(channel), batches_pb2_grpc.BatchesStub(channel))
    found = next(getattr(stub, method) for stub in stubs if hasattr(stub, method))
    assert isinstance(await failure(found(request_)), kind)
    assert store.calls == []


async def test_plain_reads_are_forwarded(channel: grpc.aio.Channel, store: ScriptedStore) -> None:
    files, batches = files_pb2_grpc.FilesStub(channel), batches_pb2_grpc.BatchesStub(channel)
    models = models_pb2_grpc.ModelsStub(channel)
    batch = make_batch()
    file = store.add_file(b"x")
    store.script("ListFiles", files_pb2.ListFilesResponse(files=[file], has_more=True))
    store.script("DeleteFile", files_pb2.DeleteFileResponse(file_id=file.id))
    store.script("GetBatch", batches_pb2.GetBatchResponse(batch=batch))
    store.script("ListBatches", batches_pb2.ListBatchesResponse(batches=[batch]))
    store.script("CancelBatch", batches_pb2.CancelBatchResponse(batch=batch))
    model = models_pb2.Model(id="m")
    store.script("ListModels", models_pb2.ListModelsResponse(models=[model]))
    store.script("GetModel", models_pb2.GetModelResponse(model=model))
    assert (await files.GetFile(files_pb2.GetFileRequest(file_id=file.id))).file == file
    listed = await files.ListFiles(files_pb2.ListFilesRequest(page=page(file.id, 7)))
    assert listed.has_more
    deleted = await files.DeleteFile(files_pb2.DeleteFileRequest(file_id=file.id))
    assert deleted.file_id == file.id
    assert (await batches.GetBatch(batches_pb2.GetBatchRequest(batch_id=batch.id))).batch == batch
    assert len((await batches.ListBatches(batches_pb2.ListBatchesRequest())).batches) == 1
    cancelled = await batches.CancelBatch(batches_pb2.CancelBatchRequest(batch_id=batch.id))
    assert cancelled.batch == batch
    assert list((await models.ListModels(models_pb2.ListModelsRequest())).models) == [model]
    assert (await models.GetModel(models_pb2.GetModelRequest(model_id="m"))).model == model
    assert store.requests("ListFiles")[0].page == page(file.id, 7)


async def test_health_and_reflection(channel: grpc.aio.Channel, store: ScriptedStore) -> None:
    await eventually(lambda: rpc.is_serving(channel))
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in stub.ServerReflectionInfo(iter([ask])):
        names = {service.name for service in answer.list_services_response.service}
        assert {f"nightshift.v1.{name}" for name in ("Files", "Batches", "Models")} <= names
        assert not any("Work" in name or "Admin" in name for name in names)


async def test_internal_services_are_not_there(
    channel: grpc.aio.Channel, store: ScriptedStore
) -> None:
    call = channel.unary_unary("/nightshift.v1.Work/Beat")(b"")
    with pytest.raises(rpc.CallFault) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
