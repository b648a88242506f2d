"""The contract of section 12 as the official Node client sees it, over a whole running system."""

import asyncio
import base64
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
from openai import AsyncOpenAI

from tests.kit.batches import (
    ENDED,
    Json,
    Watch,
    answer_to,
    chat,
    chats,
    create,
    ended,
    ids,
    jsonl,
    outcome,
    submit,
)
from tests.kit.node_client import NodeClient, node
from tests.kit.tcp_proxy import TcpProxy
from tests.kit.up import RunningUp
from tests.kit.webhook_receiver import running_receiver

__all__ = ["node"]

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

REQUEST_ID: Final = re.compile(r"req_[0-9a-f]{32}")
UNKNOWN_BATCH: Final = "batch_" + "0" * 32
UNKNOWN_FILE: Final = "file-" + "0" * 32


def in_base64(data: bytes) -> str:
    """Return bytes as the driver takes them."""
    return base64.b64encode(data).decode()


async def upload(node: NodeClient, system: RunningUp, lines: list[Json]) -> str:
    """Upload lines from Node; return the file's id."""
    found = await node.do(
        "upload_bytes",
        base_url=system.base_url,
        base64=in_base64(jsonl(lines)),
        name="in.jsonl",
        purpose="batch",
    )
    return str(found["file"]["id"])


async def test_it_is_the_node_of_the_wheel(node: NodeClient) -> None:
    assert (await node.do("version"))["node"].startswith("v24.")


# contract: 5
async def test_a_read_stream_without_a_length_and_the_file_first(
    node: NodeClient, system: RunningUp, tmp_path: Path
) -> None:
    content = jsonl(chats(3_000))
    path = tmp_path / "from node é.jsonl"
    path.write_bytes(content)
    port = int(system.url.rsplit(":", 1)[1])
    async with TcpProxy(port) as proxy:
        proxy.kept = bytearray()
        found = await node.do(
            "upload_stream",
            base_url=f"http://127.0.0.1:{proxy.port}/v1",
            path=str(path),
            purpose="batch",
        )
        head, _, body = bytes(proxy.kept).partition(b"\r\n\r\n")
    # What makes this upload awkward has really been sent.
    assert b"transfer-encoding: chunked" in head.lower()
    assert b"content-length" not in head.lower()
    assert body.index(b'name="file"') < body.index(b'name="purpose"')
    assert found["file"]["bytes"] == len(content)
    assert found["file"]["filename"] == path.name
    assert (found["file"]["purpose"], found["file"]["status"]) == ("batch", "processed")
    assert found["sha256"] == hashlib.sha256(content).hexdigest()
    assert found["content_type"] == "application/octet-stream"
    assert REQUEST_ID.fullmatch(found["request_id"])
    assert found["own_request_id"] == found["request_id"]


# contract: 8
async def test_bytes_without_a_name(node: NodeClient, system: RunningUp) -> None:
    data = jsonl(chats(1))
    found = await node.do(
        "upload_bytes", base_url=system.base_url, base64=in_base64(data), purpose="batch"
    )
    assert found["file"]["filename"] == "unknown_file"
    assert found["file"]["bytes"] == len(data)


# contract: 4, 7
async def test_expiry_and_names_from_node(node: NodeClient, system: RunningUp) -> None:
    found = await node.do(
        "upload_bytes",
        base_url=system.base_url,
        base64=in_base64(jsonl(chats(1))),
        name="zwei Wörter é.jsonl",
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    file = found["file"]
    assert file["filename"] == "zwei Wörter é.jsonl"
    assert file["expires_at"] - file["created_at"] == 3600


# contract: 21
async def test_pages_of_one_visit_every_file_once(
    node: NodeClient, system: RunningUp, openai_client: AsyncOpenAI
) -> None:
    made = [
        (await openai_client.files.create(file=(f"{n}", b"{}\n"), purpose="vision")).id
        for n in range(5)
    ]
    found = await node.do(
        "list_files", base_url=system.base_url, query={"limit": 1, "purpose": "vision"}
    )
    assert found["ids"][:5] == made[::-1]
    assert len(set(found["ids"])) == len(found["ids"]) == found["pages"]


# contract: 87
async def test_batches_page_themselves(
    node: NodeClient, system: RunningUp, openai_client: AsyncOpenAI
) -> None:
    batches = [await submit(openai_client, chats(1)) for _ in range(3)]
    found = await node.do("list_batches", base_url=system.base_url, query={"limit": 2})
    assert found["ids"][:3] == [batch.id for batch in reversed(batches)]
    assert len(set(found["ids"])) == len(found["ids"])
    assert found["pages"] == (len(found["ids"]) + 1) // 2
    for batch in batches:
        await ended(openai_client, batch)


# contract: 24, 55, 58, 61
async def test_create_poll_and_read(node: NodeClient, system: RunningUp) -> None:
    lines = [*chats(40), chat("refused", temperature=9)]
    file_id = await upload(node, system, lines)
    found = await node.do(
        "run_batch",
        base_url=system.base_url,
        batch={
            "input_file_id": file_id,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": {"from": "node"},
        },
    )
    created, batch = found["created"], found["batch"]
    assert (created["status"], created["object"]) == ("validating", "batch")
    assert created["expires_at"] - created["created_at"] == 86_400
    assert created["metadata"] == batch["metadata"] == {"from": "node"}
    order = ["validating", "in_progress", "finalizing", "completed"]
    assert [each for each in order if each in found["statuses"]] == found["statuses"]
    assert batch["request_counts"] == {"total": 41, "completed": 40, "failed": 1}
    output = [json.loads(line) for line in found["texts"]["output_file_id"].splitlines()]
    assert [line["custom_id"] for line in output] == [line["custom_id"] for line in lines[:-1]]
    answer = output[7]["response"]["body"]["choices"][0]["message"]["content"]
    assert answer == answer_to("line 7")
    [refused] = [json.loads(line) for line in found["texts"]["error_file_id"].splitlines()]
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("refused", 400)


# contract: 74, 75, 78, 82
async def test_cancel_has_no_body_and_no_content_type(
    node: NodeClient, system: RunningUp, openai_client: AsyncOpenAI
) -> None:
    slow = [chat(f"slow{n}", x_simulate={"delay_ms": 600_000}) for n in range(5)]
    watch = Watch(openai_client, await submit(openai_client, [*chats(3), *slow]))
    await watch.until(lambda: watch.done == 3, 20)
    found = await node.do("cancel_running", base_url=system.base_url, batch_id=watch.batch.id)
    assert found["cancelling"]["status"] == "cancelling"
    assert found["cancelling"]["output_file_id"] is None
    assert found["batch"]["status"] == "cancelled"
    assert found["again"] == found["batch"]
    assert [cancel["content_type"] for cancel in found["cancels"]] == [None, None]


# contract: 79, 80
async def test_a_conflict_costs_one_request(
    node: NodeClient, system: RunningUp, openai_client: AsyncOpenAI
) -> None:
    done = await ended(openai_client, await submit(openai_client, chats(1)))
    assert done.status in ENDED
    found = await node.do("refused", base_url=system.base_url, call="cancel", id=done.id)
    assert found["requests"] == 1
    error = found["error"]
    assert error["kind"] == "ConflictError"
    assert error["message"] == "409 Cannot cancel a batch with status 'completed'."
    assert error["should_retry"] == "false"


REFUSALS: Final[list[tuple[str, Json, str, int, str, str | None]]] = [
    *(
        (call, {"id": UNKNOWN_BATCH}, "NotFoundError", 404, UNKNOWN_BATCH, None)
        for call in ("retrieve_batch", "cancel")
    ),
    *(
        (call, {"id": UNKNOWN_FILE}, "NotFoundError", 404, UNKNOWN_FILE, "id")
        for call in ("retrieve_file", "content")
    ),
    (
        "create_file",
        {"purpose": "bogus"},
        "BadRequestError",
        400,
        "'bogus' is not one of ['fine-tune',",
        "purpose",
    ),
    (
        "create_batch",
        {"batch": {"endpoint": "/v1/embeddings", "completion_window": "24h"}},
        "BadRequestError",
        400,
        "Missing required parameter: 'input_file_id'.",
        "input_file_id",
    ),
    ("list_files", {"query": {"limit": 10_001}}, "BadRequestError", 400, "10001", "limit"),
    ("online", {}, "NotFoundError", 404, "Invalid URL (POST /v1/nothing)", None),
]


# contract: 9, 16, 22, 28, 81, 96, 98
@pytest.mark.parametrize(
    ("call", "given", "kind", "status", "says", "param"),
    REFUSALS,
    ids=[f"{refusal[0]}-{refusal[2]}" for refusal in REFUSALS],
)
async def test_a_refusal_says_what_to_change(
    node: NodeClient,
    system: RunningUp,
    call: str,
    given: dict[str, Any],
    kind: str,
    status: int,
    says: str,
    param: str | None,
) -> None:
    found = await node.do("refused", base_url=system.base_url, call=call, **given)
    error = found["error"]
    assert (error["kind"], error["status"], error["param"]) == (kind, status, param)
    assert error["message"].startswith(f"{status} ")
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert REQUEST_ID.fullmatch(error["request_id"])
    assert error["request_id"] == error["header"]
    assert found["requests"] == 1


# contract: 96
async def test_a_success_names_its_request(node: NodeClient, system: RunningUp) -> None:
    file_id = await upload(node, system, chats(1))
    found = await node.do("request_ids", base_url=system.base_url, id=file_id)
    assert REQUEST_ID.fullmatch(found["header"])
    assert found["own"] == found["given"] == found["header"]


# contract: 17
async def test_delete(node: NodeClient, system: RunningUp) -> None:
    found = await node.do("delete_file", base_url=system.base_url)
    assert found["deleted"] == {"id": found["id"], "object": "file", "deleted": True}


async def test_wait_for_processing(node: NodeClient, system: RunningUp) -> None:
    file_id = await upload(node, system, chats(1))
    began = asyncio.get_running_loop().time()
    found = await node.do("wait_for_processing", base_url=system.base_url, id=file_id)
    assert found["file"]["status"] == "processed"
    # It sleeps 5 s before it asks again; a file left at `uploaded` would cost that.
    assert asyncio.get_running_loop().time() - began < 4


# contract: 91, 92
async def test_parts_sent_at_once_follow_the_order_of_completion(
    node: NodeClient, system: RunningUp, openai_client: AsyncOpenAI
) -> None:
    lines = chats(40)
    content = jsonl(lines)
    # Cut anywhere, in the middle of lines, and sent in another order.
    edges = [0, 1, 700, 701, 2_345, len(content) - 1, len(content)]
    parts = [content[start:end] for start, end in itertools.pairwise(edges)]
    order = [3, 0, 5, 1, 4, 2]
    found = await node.do(
        "upload_parts",
        base_url=system.base_url,
        filename="in parts.jsonl",
        purpose="batch",
        parts=[in_base64(parts[index]) for index in order],
        order=[order.index(index) for index in range(len(parts))],
    )
    assert (found["upload"]["status"], found["upload"]["file"]) == ("pending", None)
    assert {part["object"] for part in found["parts"]} == {"upload.part"}
    completed = found["completed"]
    assert completed["status"] == "completed"
    assert completed["file"]["bytes"] == len(content)
    assert completed["file"]["filename"] == "in parts.jsonl"
    assert found["sha256"] == hashlib.sha256(content).hexdigest()
    done = await ended(openai_client, await create(openai_client, completed["file"]["id"]))
    assert (await outcome(openai_client, done, ids(lines))).counts == (40, 40, 0)


# contract: 100
async def test_a_delivery_unwraps(node: NodeClient, openai_client: AsyncOpenAI) -> None:
    types = ["batch.completed", "batch.failed"]
    async with running_receiver() as receiver:
        endpoint = await openai_client.webhooks.create(
            event_types=types, name="for node", url=f"{receiver.url}/node"
        )
        good = await ended(openai_client, await submit(openai_client, chats(1)))
        bad = await ended(openai_client, await submit(openai_client, [chat("same"), chat("same")]))
        deliveries = await receiver.got(2)
        await openai_client.webhooks.delete(endpoint.id)
    events = {}
    for delivery in deliveries:
        body = delivery.body.decode()
        given = {"body": body, "headers": dict(delivery.headers)}
        found = await node.do("unwrap", **given, secret=endpoint.signing_secret)
        assert found["event"] == json.loads(delivery.body)
        events[found["event"]["data"]["id"]] = found["event"]
        assert found["event"]["data"].keys() == {"id"}
        other = await node.do("unwrap", **given, secret="whsec_" + "A" * 43 + "=")
        assert other == {"refused": "InvalidWebhookSignatureError"}
        tampered = given | {"body": body.replace("completed", "cancelled") + " "}
        assert "refused" in await node.do("unwrap", **tampered, secret=endpoint.signing_secret)
    assert {batch_id: event["type"] for batch_id, event in events.items()} == {
        good.id: "batch.completed",
        bad.id: "batch.failed",
    }
