"""Webhooks over a whole running system, with the official client on both of their sides."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx2
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types import Batch

from protos.nightshift.v1 import webhooks_pb2, webhooks_pb2_grpc
from services.kit.wire.errors import InvalidRequestError, NotFoundError
from tests.contract.conftest import NOBODY
from tests.kit.batches import chat, chats, create, ended, submit, upload
from tests.kit.eventually import eventually
from tests.kit.store import our_errors
from tests.kit.up import RunningUp
from tests.kit.webhook_receiver import Receiver, running_receiver

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

TYPES = ["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"]
KEYS = {
    *("id", "object", "name", "url", "event_types", "created_at", "updated_at"),
    "signing_secret_hint",
}
RETRY_SECONDS = 30.0
"""The first retry comes within 5 s, the second within 15; a busy machine may take longer."""


@pytest_asyncio.fixture(loop_scope="module")
async def receiver() -> AsyncIterator[Receiver]:
    """Run a receiver for one test."""
    async with running_receiver() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def endpoint(openai_client: AsyncOpenAI, receiver: Receiver) -> AsyncIterator[Any]:
    """Make an endpoint for all events, and remove it after the test."""
    made = await openai_client.webhooks.create(
        event_types=TYPES, name="all", url=f"{receiver.url}/hook"
    )
    yield made
    await openai_client.webhooks.delete(made.id)


async def end(client: AsyncOpenAI, batch: Batch, status: str) -> Batch:
    """Wait for a batch to end so."""
    done = await ended(client, batch)
    assert done.status == status
    return done


# contract: 100
async def test_each_end_is_told_and_unwraps(
    openai_client: AsyncOpenAI, receiver: Receiver, endpoint: Any
) -> None:
    client = openai_client
    late = await create(client, await upload(client, [chat("a", model=NOBODY)]), window="2s")
    good = await submit(client, chats(2))
    bad = await submit(client, [chat("same"), chat("same")])
    unwanted = await submit(client, [chat("a", model=NOBODY)])
    await client.batches.cancel(unwanted.id)
    batches = [
        await end(client, good, "completed"),
        await end(client, bad, "failed"),
        await end(client, unwanted, "cancelled"),
        await end(client, late, "expired"),
    ]
    requests = await receiver.got(4)
    events = {
        event.data.id: event for event in (r.unwrap(endpoint.signing_secret) for r in requests)
    }
    assert len(requests) == len(events) == 4
    for batch in batches:
        event = events[batch.id]
        assert event.type == f"batch.{batch.status}"
        assert event.object == "event"
        assert event.created_at == getattr(batch, f"{batch.status}_at")
    for request in requests:
        body = json.loads(request.body)
        assert body.keys() == {"id", "object", "created_at", "type", "data"}
        assert body["data"].keys() == {"id"}
        assert body["id"].startswith("evt_")
        assert request.id.startswith("wh_")
        assert request.headers["content-type"] == "application/json"
        with pytest.raises(openai.InvalidWebhookSignatureError):
            request.unwrap("whsec_" + "A" * 43 + "=")


# contract: 100
async def test_what_is_not_taken_comes_again_under_the_same_id_and_redirects_are_not_followed(
    openai_client: AsyncOpenAI, receiver: Receiver, endpoint: Any
) -> None:
    receiver.answers.extend([500, 302])
    await submit(openai_client, chats(1))
    requests = await receiver.got(3, within_seconds=RETRY_SECONDS)
    assert {request.path for request in requests} == {"/hook"}
    assert len({request.id for request in requests}) == 1
    stamps = [int(request.headers["webhook-timestamp"]) for request in requests]
    assert stamps == sorted(set(stamps))
    for request in requests:
        assert request.unwrap(endpoint.signing_secret).type == "batch.completed"


async def test_endpoints_are_managed_with_the_official_client(
    openai_client: AsyncOpenAI, receiver: Receiver
) -> None:
    webhooks = openai_client.webhooks
    types = await webhooks.event_types.list()
    assert (types.object, types.data) == ("list", TYPES)
    raw = await webhooks.with_raw_response.create(
        event_types=["batch.failed", "batch.failed"], name="one", url=receiver.url
    )
    body = json.loads(raw.http_response.content)
    assert body.keys() == {*KEYS, "signing_secret"}
    made = raw.parse()
    assert made.object == "webhook_endpoint"
    assert made.id.startswith("we_")
    assert made.event_types == ["batch.failed"]
    assert made.updated_at == made.created_at
    assert made.signing_secret.startswith("whsec_")
    assert made.signing_secret_hint
    assert made.signing_secret_hint not in made.signing_secret

    read = await webhooks.with_raw_response.retrieve(made.id)
    assert json.loads(read.http_response.content).keys() == KEYS
    listed = [each async for each in webhooks.list(limit=1)]
    assert [each.id for each in listed] == [made.id]
    changed = await webhooks.update(made.id, name="two")
    assert (changed.name, changed.url, changed.event_types) == (
        "two",
        receiver.url,
        ["batch.failed"],
    )

    answer = await webhooks.test(made.id, event_type="batch.expired")
    assert (answer.object, answer.status_code, answer.success) == (
        "webhook_endpoint.test",
        204,
        True,
    )
    assert receiver.received[0].unwrap(made.signing_secret).type == "batch.expired"

    rotated = await webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
    await webhooks.test(made.id, event_type="batch.expired")
    for secret in (made.signing_secret, rotated.signing_secret):
        assert receiver.received[1].unwrap(secret).type == "batch.expired"
    last = await webhooks.rotate_secret(made.id)
    await webhooks.test(made.id, event_type="batch.expired")
    assert receiver.received[2].unwrap(last.signing_secret).type == "batch.expired"
    with pytest.raises(openai.InvalidWebhookSignatureError):
        receiver.received[2].unwrap(rotated.signing_secret)

    deleted = await webhooks.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (
        made.id,
        "webhook_endpoint.deleted",
        True,
    )
    for call in (
        webhooks.retrieve(made.id),
        webhooks.update(made.id, name="x"),
        webhooks.delete(made.id),
        webhooks.rotate_secret(made.id),
        webhooks.test(made.id, event_type="batch.failed"),
    ):
        with pytest.raises(openai.NotFoundError, match="No webhook endpoint found"):
            await call


BAD_CREATES: list[tuple[Any, str | None]] = [
    ({}, "name"),
    ({"name": "n", "url": "https://example.com"}, "event_types"),
    ({"name": "n", "url": "https://example.com", "event_types": []}, "event_types"),
    ({"name": "n", "url": "https://example.com", "event_types": "batch.failed"}, "event_types"),
    ({"name": "n", "url": "https://example.com", "event_types": [1]}, "event_types[0]"),
    ({"name": "n", "url": "https://example.com", "event_types": ["video.failed"]}, "event_types"),
    ({"name": "", "url": "https://example.com", "event_types": TYPES}, "name"),
    ({"name": 1, "url": "https://example.com", "event_types": TYPES}, "name"),
    ({"name": "n" * 257, "url": "https://example.com", "event_types": TYPES}, "name"),
    ({"name": "n", "url": "example.com", "event_types": TYPES}, "url"),
    ({"name": "n", "url": "https://a:b@example.com", "event_types": TYPES}, "url"),
    ({"name": "n", "url": None, "event_types": TYPES}, "url"),
    ({"name": "n", "url": "https://example.com", "event_types": TYPES, "x": 1}, "x"),
    ([], None),
]


@pytest.mark.parametrize(("body", "param"), BAD_CREATES)
async def test_what_is_no_endpoint_is_refused(
    system: RunningUp, body: Any, param: str | None
) -> None:
    async with httpx2.AsyncClient(base_url=system.url) as http:
        answer = await http.post("/v1/webhook_endpoints", json=body)
        listed = (await http.get("/v1/webhook_endpoints")).json()
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert listed == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


async def test_a_test_without_an_answer_says_why(openai_client: AsyncOpenAI, endpoint: Any) -> None:
    client = openai_client
    await client.webhooks.update(endpoint.id, url="http://nobody.invalid/")
    with pytest.raises(openai.BadRequestError, match="did not answer") as refused:
        await client.webhooks.test(endpoint.id, event_type="batch.failed")
    assert refused.value.code == "webhook_test_failed"
    with pytest.raises(openai.BadRequestError, match="Supported values"):
        await client.webhooks.test(endpoint.id, event_type="video.failed")


async def test_grpc_does_the_same(system: RunningUp, receiver: Receiver) -> None:
    async with grpc.aio.insecure_channel(system.grpc) as channel:
        stub = webhooks_pb2_grpc.WebhooksStub(channel)
        with pytest.raises(InvalidRequestError) as refused, our_errors():
            await stub.CreateWebhookEndpoint(
                webhooks_pb2.CreateWebhookEndpointRequest(
                    name="n", url="ftp://x", event_types=TYPES
                )
            )
        assert refused.value.param == "url"
        made = await stub.CreateWebhookEndpoint(
            webhooks_pb2.CreateWebhookEndpointRequest(name="n", url=receiver.url, event_types=TYPES)
        )
        where = {"webhook_endpoint_id": made.endpoint.id}
        answer = await stub.TestWebhookEndpoint(
            webhooks_pb2.TestWebhookEndpointRequest(**where, event_type="batch.failed")
        )
        assert answer.status_code == 204
        assert receiver.received[0].unwrap(made.signing_secret).type == "batch.failed"
        listed = await stub.ListWebhookEndpoints(webhooks_pb2.ListWebhookEndpointsRequest())
        assert list(listed.endpoints) == [made.endpoint]
        await stub.DeleteWebhookEndpoint(webhooks_pb2.DeleteWebhookEndpointRequest(**where))
        with pytest.raises(NotFoundError), our_errors():
            await stub.GetWebhookEndpoint(webhooks_pb2.GetWebhookEndpointRequest(**where))


async def nightshift(system: RunningUp, *arguments: str) -> tuple[int, str, str]:
    """Run the command; returns status, standard output and standard error."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "services.cli.main", "webhooks", *arguments],
        env={"NIGHTSHIFT_URL": system.url, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.returncode, done.stdout, done.stderr


async def test_the_command_manages_and_redelivers(
    system: RunningUp, openai_client: AsyncOpenAI, receiver: Receiver
) -> None:
    status, secret, told = await nightshift(system, "create", f"{receiver.url}/hook")
    assert status == 0, told
    secret = secret.strip()
    endpoint_id = told.split()[1].rstrip(";")
    status, out, _ = await nightshift(system, "list")
    assert endpoint_id in out
    assert secret not in out

    await submit(openai_client, chats(1))
    [request] = await receiver.got(1)
    event = request.unwrap(secret)

    async def delivered() -> bool:
        _, out, _ = await nightshift(system, "deliveries", "--state", "delivered", "--json")
        return request.id in out

    assert await eventually(delivered)
    for number, wanted in enumerate((event.id, request.id), start=2):
        status, out, told = await nightshift(system, "redeliver", wanted, "--json")
        assert status == 0, told
        assert json.loads(out)["id"] == request.id
        requests = await receiver.got(number)
        assert (requests[-1].id, requests[-1].body) == (request.id, request.body)
        requests[-1].unwrap(secret)
    assert (await nightshift(system, "redeliver", "evt_none"))[0] == 1

    receiver.answers.append(503)
    status, _, told = await nightshift(system, "test", endpoint_id)
    assert (status, "answered 503" in told) == (1, True)
    status, rotated, _ = await nightshift(system, "rotate", endpoint_id, "--keep-old")
    assert (await nightshift(system, "test", endpoint_id))[0] == 0
    for each in (secret, rotated.strip()):
        receiver.received[-1].unwrap(each)
    assert (await nightshift(system, "delete", endpoint_id))[0] == 0
    assert (await nightshift(system, "delete", endpoint_id))[0] == 1
    log = system.log.read_text()
    assert endpoint_id in log
    assert "whsec_" not in log
