"""Projects never see each other: every route and every RPC, with another project's ids.

The routes come from the application and the RPCs from the running server, so that a new one fails
here until it is said what of it is whose.
"""

import asyncio
import importlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import httpx2
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from starlette.routing import Route

import protos.nightshift.v1
from protos.nightshift.v1 import admin_pb2, batches_pb2
from services.gateway.context import Context
from services.gateway.keys import KeyAuth
from services.gateway.limits import RequestLimiter
from services.gateway.main import Listening, running
from services.gateway.rest.app import routes
from services.gateway.settings import GatewaySettings
from services.gateway.store import Store
from services.kit.calls import rpc
from services.kit.process.clock import SystemClock
from services.kit.wire import ids
from tests.kit.eventually import eventually
from tests.kit.store import StoreProcess, chat_line, client_of, store_process

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHARED_ROUTES: Final = {"/v1/models", "/v1/models/{model_id:path}", "/v1/webhook_event_types"}
"""They tell of the fleet, the same to everyone."""
OPEN_ROUTES: Final = {"/healthz", "/readyz", "/metrics", "/openapi.yaml", "/docs"}
ID_LESS_ROUTES: Final = {"/v1/files", "/v1/uploads", "/v1/webhook_endpoints"}
"""POST there makes something new and takes no id."""

SHARED_RPCS: Final = {"ListModels", "GetModel", "ListWebhookEventTypes"}
ID_LESS_RPCS: Final = {"UploadFile", "CreateUpload", "CreateWebhookEndpoint"}

ID_FIELDS: Final = {
    "file_id": "file",
    "batch_id": "batch",
    "upload_id": "upload",
    "webhook_endpoint_id": "endpoint",
    "endpoint_id": "endpoint",
    "delivery_id": "delivery",
    "id": "delivery",
}
"""Path parameter or field → which of the other project's objects it names."""

LISTS: Final = {
    "/v1/files": "file",
    "/v1/batches": "batch",
    "/v1/webhook_endpoints": "endpoint",
    "/v1/webhook_deliveries": "delivery",
    "ListFiles": "file",
    "ListBatches": "batch",
    "ListWebhookEndpoints": "endpoint",
    "ListWebhookDeliveries": "delivery",
}
"""List → what stands in it."""

PART: Final = (
    b'--b\r\nContent-Disposition: form-data; name="data"; filename="f"\r\n\r\nx\r\n--b--\r\n'
)
BODIES: Final[dict[str, tuple[str, bytes]]] = {
    "/v1/uploads/{upload_id}/parts": ("multipart/form-data; boundary=b", PART),
    "/v1/uploads/{upload_id}/complete": ("application/json", b'{"part_ids": ["part_1"]}'),
    "/v1/webhook_endpoints/{endpoint_id}": ("application/json", b'{"name": "mine now"}'),
    "/v1/webhook_endpoints/{endpoint_id}/test": (
        "application/json",
        b'{"event_type": "batch.failed"}',
    ),
    "/v1/webhook_endpoints/{endpoint_id}/rotate_secret": (
        "application/json",
        b'{"keep_old_secret_active_for_24_hours": false}',
    ),
}
BATCH: Final = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}


@dataclass(frozen=True)
class Two:
    """A running gateway and store, the objects of one project, and the key of another."""

    listening: Listening
    owner: httpx2.AsyncClient
    stranger: httpx2.AsyncClient
    stranger_key: str
    objects: dict[str, str]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A real store."""
    with store_process(tmp_path_factory.mktemp("isolation")) as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(store: StoreProcess) -> AsyncIterator[Two]:
    """Two projects, of which one has an object of every kind."""
    keys = []
    async with client_of(store) as client:
        for project in ("owner", "stranger"):
            made = await client.admin.CreateKey(
                admin_pb2.CreateKeyRequest(project_id=project), metadata=client.metadata
            )
            keys.append(made.secret)
    settings = GatewaySettings(listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", store=store.address)
    secret = (store.data / "secret").read_text().strip()
    async with running(settings, secret) as listening:
        base = f"http://127.0.0.1:{listening.http_port}"
        async with (
            httpx2.AsyncClient(base_url=base, timeout=30, headers=bearer(keys[0])) as owner,
            httpx2.AsyncClient(base_url=base, timeout=30, headers=bearer(keys[1])) as stranger,
        ):
            yield Two(listening, owner, stranger, keys[1], await make_objects(owner))


def bearer(key: str) -> dict[str, str]:
    """Return the header that shows a key."""
    return {"authorization": f"Bearer {key}"}


async def make_objects(owner: httpx2.AsyncClient) -> dict[str, str]:
    """Make one object of every kind."""

    async def made(path: str, **body: Any) -> str:
        answer = await owner.post(path, **body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    endpoint = await made(
        "/v1/webhook_endpoints",
        json={"name": "e", "url": "https://nobody.invalid/", "event_types": ["batch.failed"]},
    )
    # A batch that fails is one that has ended, of which its endpoint is told.
    lines = chat_line("a") + b"{oops\n"
    file = await made("/v1/files", files={"file": ("f", lines)}, data={"purpose": "batch"})
    batch = await made("/v1/batches", json={**BATCH, "input_file_id": file})
    upload = await made(
        "/v1/uploads",
        json={"filename": "f", "purpose": "batch", "bytes": 1, "mime_type": "text/jsonl"},
    )

    async def delivery() -> str:
        listed = (await owner.get("/v1/webhook_deliveries")).json()["data"]
        return str(listed[0]["id"]) if listed else ""

    return {
        "endpoint": endpoint,
        "file": file,
        "batch": batch,
        "upload": upload,
        "delivery": await eventually(delivery),
    }


async def served() -> list[tuple[str, str]]:
    """Return method and path of every route, each path once."""
    async with rpc.open_channel("127.0.0.1:1") as channel:
        unused, clock = Store(channel, "s"), SystemClock()
        context = Context(
            store=unused,
            auth=KeyAuth(unused, clock),
            limiter=RequestLimiter(clock),
            windows={},
            new_id=ids.uuid7_hex,
        )
        return sorted(
            (method, route.path)
            for route in routes(context)
            if isinstance(route, Route) and not route.path.endswith("/")
            for method in (route.methods or set()) - {"HEAD"}
        )


def about(method: str, path: str, objects: dict[str, str]) -> dict[str, Any]:
    """Return the request that asks a route about the other project's objects."""
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    # A parameter that is not known fails here: say in ID_FIELDS what it names.
    url = path.format(**{name: objects[ID_FIELDS[name]] for name in names})
    kind, content = BODIES.get(path, ("", b"")) if method == "POST" else ("", b"")
    headers = {"content-type": kind} if kind else {}
    return {"method": method, "url": url, "content": content, "headers": headers}


async def with_ids() -> list[tuple[str, str]]:
    """Return the routes that take an id of a project's object."""
    return [
        (method, path)
        for method, path in await served()
        if "{" in path and path not in SHARED_ROUTES
    ]


# contract: 37, 90
async def test_every_route_answers_another_projects_id_as_unknown(two: Two) -> None:
    asked = await with_ids()
    assert len(asked) >= 15
    for method, path in asked:
        answer = await two.stranger.request(**about(method, path, two.objects))
        assert answer.status_code == 404, (method, path, answer.text)
        # Not the refusal of a route that is not there.
        assert "Invalid URL" not in answer.text, (method, path)


async def test_every_route_without_an_id_shows_nothing_of_another_project(two: Two) -> None:
    known = SHARED_ROUTES | OPEN_ROUTES
    for method, path in await served():
        if "{" in path or path in known or (method == "POST" and path in ID_LESS_ROUTES):
            continue
        match method, path:
            case "GET", _ if path in LISTS:
                listed = (await two.stranger.get(path)).json()
                assert (listed["data"], listed["has_more"]) == ([], False), path
                after = {"after": two.objects[LISTS[path]]}
                assert (await two.stranger.get(path, params=after)).status_code == 404, path
                assert (await two.owner.get(path)).json()["data"], path
            case "GET", "/v1/usage":
                assert (await two.stranger.get(path)).json()["batches"] == 0
                assert (await two.owner.get(path)).json()["batches"] == 1
            case "POST", "/v1/batches":
                await check_input(two)
            case _:
                raise AssertionError(f"say what {method} {path} may show")


async def check_input(two: Two) -> None:
    """Another project's file as input is a file that is not there; leaves no batch of one's own."""
    body = {**BATCH, "input_file_id": two.objects["file"]}
    own = (await two.stranger.post("/v1/batches", json=body)).json()

    async def failed() -> dict[str, Any] | None:
        batch: dict[str, Any] = (await two.stranger.get(f"/v1/batches/{own['id']}")).json()
        return batch if batch["status"] == "failed" else None

    batch = await eventually(failed)
    assert batch is not None
    (error,) = batch["errors"]["data"]
    assert error["param"] == "file_id"
    assert error["message"].startswith("Cannot find file")


async def test_a_filter_by_another_projects_endpoint_shows_nothing(two: Two) -> None:
    wanted = {"webhook_endpoint_id": two.objects["endpoint"]}
    answer = await two.stranger.get("/v1/webhook_deliveries", params=wanted)
    assert answer.status_code == 404 or answer.json()["data"] == []
    assert (await two.owner.get("/v1/webhook_deliveries", params=wanted)).json()["data"]


def every_method(listening: Listening) -> list[MethodDescriptor]:
    """Return every RPC that the public server says it has."""
    for file in Path(protos.nightshift.v1.__path__[0]).glob("*.proto"):
        importlib.import_module(f"protos.nightshift.v1.{file.stem}_pb2")
    with grpc.insecure_channel(f"127.0.0.1:{listening.grpc_port}") as channel:
        names = ProtoReflectionDescriptorDatabase(channel).get_services()
    pool = descriptor_pool.Default()
    return [
        method
        for name in names
        if name.startswith("nightshift.")
        for method in pool.FindServiceByName(name).methods
    ]


def fill(message: Message, objects: dict[str, str]) -> bool:
    """Set all ids of a request to the other project's; tells whether there was one."""
    found = False
    descriptor: Descriptor = message.DESCRIPTOR
    for field in descriptor.fields:
        if field.is_repeated:
            continue
        if field.message_type is not None and field.name != "page":
            inner = message_factory.GetMessageClass(field.message_type)()
            if fill(inner, objects):
                getattr(message, field.name).CopyFrom(inner)
                found = True
        elif field.name in ID_FIELDS:
            setattr(message, field.name, objects[ID_FIELDS[field.name]])
            found = True
        elif field.name == "event_type":
            setattr(message, field.name, "batch.failed")
    return found


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


async def call(two: Two, channel: grpc.aio.Channel, method: MethodDescriptor, request: Message):  # type: ignore[no-untyped-def]  # whatever the method answers
    """Call a method of any of the four shapes as the stranger; returns its first answer."""
    assert method.containing_service is not None
    name = f"/{method.containing_service.full_name}/{method.name}"
    shape = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }[method.client_streaming, method.server_streaming]
    answers = message_factory.GetMessageClass(method.output_type)
    making: Any = shape(
        name,
        request_serializer=_serialized,
        response_deserializer=answers.FromString,
    )
    given: Any = request
    if method.client_streaming:
        end: Any = type(request)()
        end.footer.SetInParent()
        given = iter([request, end])
    running_call = making(given, metadata=tuple(bearer(two.stranger_key).items()), timeout=20)
    return await (running_call.read() if method.server_streaming else running_call)


@pytest_asyncio.fixture(loop_scope="module")
async def channel(two: Two) -> AsyncIterator[grpc.aio.Channel]:
    """The stranger's channel."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{two.listening.grpc_port}") as opened:
        yield opened


async def unknown(two: Two, channel: grpc.aio.Channel, method: MethodDescriptor, wanted: Message):  # type: ignore[no-untyped-def]  # nothing
    """Assert that a call is answered as for what is not there."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(two, channel, method, wanted)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND, (method.full_name, refused.value)


async def test_every_rpc_answers_another_projects_id_as_unknown(
    two: Two, channel: grpc.aio.Channel
) -> None:
    # The reflection client blocks, and the server is this process.
    methods = await asyncio.to_thread(every_method, two.listening)
    assert len(methods) >= 20
    for method in methods:
        if method.name in SHARED_RPCS | ID_LESS_RPCS:
            continue
        request = message_factory.GetMessageClass(method.input_type)()
        if method.name in LISTS:
            listed = await call(two, channel, method, request)
            assert not listed.has_more, method.full_name
            page: Any = request
            page.page.after = two.objects[LISTS[method.name]]
            await unknown(two, channel, method, request)
        elif method.name == "GetUsage":
            used = await call(two, channel, method, request)
            assert used.project_id == "stranger"
            assert {part.project_id for part in used.by_key} <= {"stranger"}
        elif method.name == "CreateBatch":
            wanted = batches_pb2.CreateBatchRequest(input_file_id=two.objects["file"], **BATCH)
            own = await call(two, channel, method, wanted)
            assert own.batch.id != two.objects["batch"]
        else:
            assert fill(request, two.objects), f"say what {method.full_name} may show"
            await unknown(two, channel, method, request)


async def test_the_owner_finds_all_as_it_was(two: Two) -> None:
    """All that the stranger tried has changed nothing, and each route does know its object."""
    batch = (await two.owner.get(f"/v1/batches/{two.objects['batch']}")).json()
    assert batch["status"] == "failed"
    endpoint = await two.owner.get(f"/v1/webhook_endpoints/{two.objects['endpoint']}")
    assert endpoint.json()["name"] == "e"
    asked = await with_ids()
    # What deletes comes last.
    for method, path in sorted(asked, key=lambda one: ("GET", "POST", "DELETE").index(one[0])):
        answer = await two.owner.request(**about(method, path, two.objects))
        assert answer.status_code not in (401, 403, 404, 405), (method, path, answer.text)
        if method == "GET":
            assert answer.status_code == 200, (method, path, answer.text)
