"""The description says what is served, and what is served is as described."""

from importlib.resources import files
from typing import Any

import httpx2
import jsonschema
import pytest
import yaml
from starlette.routing import Route

from protos.nightshift.v1 import batches_pb2, common_pb2, files_pb2, models_pb2
from services.gateway import checks
from services.gateway.context import Context
from services.gateway.keys import KeyAuth
from services.gateway.limits import RequestLimiter
from services.gateway.rest.app import routes
from services.gateway.store import Store
from services.kit.calls import rpc
from services.kit.process.clock import SystemClock
from services.kit.wire import ids
from services.kit.wire.endpoints import ENDPOINTS
from services.kit.wire.errors import ConflictError
from tests.kit.public_store import ScriptedStore, batch_id, file_id, make_batch, make_file

pytestmark = pytest.mark.asyncio(loop_scope="session")

DESCRIPTION: dict[str, Any] = yaml.safe_load(
    (files("services.gateway") / "openapi.yaml").read_text()
)
METHODS = {"get", "post", "put", "delete", "patch"}


def as_json_schema(node: Any) -> Any:
    """Return an OpenAPI 3.0 schema as JSON Schema, which spells null otherwise."""
    if isinstance(node, list):
        return [as_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: as_json_schema(value) for key, value in node.items() if key != "nullable"}
    if node.get("nullable"):
        out["type"] = [out["type"], "null"]
    return out


def check(name: str, value: Any) -> None:
    """Hold `value` against a schema of the description."""
    schema = {
        "components": as_json_schema(DESCRIPTION["components"]),
        "$ref": f"#/components/schemas/{name}",
    }
    jsonschema.Draft202012Validator(schema).validate(value)


async def test_routes_are_those_described() -> None:
    async with rpc.open_channel("127.0.0.1:1") as channel:
        store, clock = Store(channel, "s"), SystemClock()
        context = Context(
            store=store,
            auth=KeyAuth(store, clock),
            limiter=RequestLimiter(clock),
            windows={},
            new_id=ids.uuid7_hex,
        )
        served = {
            (route.path.replace(":path}", "}"), method)
            for route in routes(context)
            if isinstance(route, Route) and not route.path.endswith("/")
            for method in (route.methods or set()) - {"HEAD"}
        }
    described = {
        (path, method.upper())
        for path, item in DESCRIPTION["paths"].items()
        for method in METHODS & set(item)
    }
    assert served == described


def references(node: Any) -> set[str]:
    """Return all references below `node`."""
    if isinstance(node, list):
        return set().union(*map(references, node))
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
    return own.union(*map(references, node.values()))


async def test_every_reference_leads_somewhere() -> None:
    for reference in references(DESCRIPTION):
        node = DESCRIPTION
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]
    names = {
        operation["operationId"]
        for item in DESCRIPTION["paths"].values()
        for method, operation in item.items()
        if method in METHODS
    }
    assert len(names) == sum(len(METHODS & set(item)) for item in DESCRIPTION["paths"].values())


async def test_limits_are_those_of_the_code() -> None:
    schemas = DESCRIPTION["components"]["schemas"]
    create = schemas["CreateBatch"]["properties"]
    assert tuple(schemas["UploadPurpose"]["enum"]) == checks.PURPOSES
    assert tuple(create["endpoint"]["enum"]) == ENDPOINTS
    seconds = create["output_expires_after"]["properties"]["seconds"]
    assert seconds["minimum"] == checks.MIN_EXPIRY_SECONDS
    assert seconds["maximum"] == checks.MAX_EXPIRY_SECONDS
    assert schemas["Metadata"]["maxProperties"] == checks.MAX_METADATA_PAIRS
    value = schemas["Metadata"]["additionalProperties"]
    assert value["maxLength"] == checks.MAX_METADATA_VALUE


FULL = make_batch(
    status=batches_pb2.BATCH_STATUS_CANCELLED,
    model="m",
    errors=[batches_pb2.BatchError(code="c", line=1, message="m", param="p")],
    output_file_id=file_id(2),
    error_file_id=file_id(3),
    in_progress_at=1,
    finalizing_at=1,
    completed_at=1,
    failed_at=1,
    expired_at=1,
    cancelling_at=1,
    cancelled_at=1,
    usage=common_pb2.Usage(input_tokens=2**40),
    metadata={"a": "b"},
    has_metadata=True,
    nightshift=batches_pb2.BatchExplanation(
        pool="p",
        queue_position=3,
        executors=0,
        reason="3 batches ahead",
        engine_revision="e",
        engines=[batches_pb2.BatchEngines(pool="p", revisions=["d", "e"])],
    ),
)


@pytest.mark.parametrize("batch", [make_batch(), FULL], ids=["fresh", "full"])
async def test_batches_are_as_described(
    http: httpx2.AsyncClient, store: ScriptedStore, batch: batches_pb2.Batch
) -> None:
    store.script("GetBatch", batches_pb2.GetBatchResponse(batch=batch))
    store.script("ListBatches", batches_pb2.ListBatchesResponse(batches=[batch]))
    check("Batch", (await http.get(f"/v1/batches/{batch_id()}")).json())
    check("BatchList", (await http.get("/v1/batches")).json())


@pytest.mark.parametrize("status", batches_pb2.BatchStatus.values()[1:])
async def test_every_status_is_described(
    http: httpx2.AsyncClient, store: ScriptedStore, status: batches_pb2.BatchStatus.ValueType
) -> None:
    store.script("GetBatch", batches_pb2.GetBatchResponse(batch=make_batch(status=status)))
    check("Batch", (await http.get(f"/v1/batches/{batch_id()}")).json())


async def test_the_rest_is_as_described(http: httpx2.AsyncClient, store: ScriptedStore) -> None:
    store.add_file(b"x", expires_at=1)
    store.script("ListFiles", files_pb2.ListFilesResponse(files=[make_file()]))
    store.script("DeleteFile", files_pb2.DeleteFileResponse(file_id=file_id()))
    store.script("ListModels", models_pb2.ListModelsResponse(models=[models_pb2.Model(id="m")]))
    store.script("CancelBatch", ConflictError("no"))
    used = batches_pb2.KeyUsage(project_id="default", key_id="key_1", key_name="k", batches=2)
    unnamed = batches_pb2.KeyUsage(project_id="default", batches=1)
    usage = batches_pb2.GetUsageResponse(project_id="default", by_key=[used, unnamed])
    store.script("GetUsage", usage)
    check("ProjectUsage", (await http.get("/v1/usage")).json())
    check("File", (await http.get(f"/v1/files/{file_id()}")).json())
    check("FileList", (await http.get("/v1/files")).json())
    check("DeletedFile", (await http.delete(f"/v1/files/{file_id()}")).json())
    check("ModelList", (await http.get("/v1/models")).json())
    check("Error", (await http.post(f"/v1/batches/{batch_id()}/cancel")).json())
    check("Error", (await http.get("/v1/none")).json())
    with pytest.raises(jsonschema.ValidationError):
        check("File", {})
