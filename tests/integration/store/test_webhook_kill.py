"""A store that is killed between a batch's end and its webhook sends it when it is back."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protos.nightshift.v1 import batches_pb2, webhooks_pb2, webhooks_pb2_grpc
from tests.kit.eventually import eventually
from tests.kit.store import Client, StoreProcess, chat_line
from tests.kit.webhook_receiver import Receiver, running_receiver

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FAILED = batches_pb2.BATCH_STATUS_FAILED
DELIVERED = webhooks_pb2.WEBHOOK_DELIVERY_STATE_DELIVERED


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with running_receiver() as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> StoreProcess:
    return StoreProcess(tmp_path / "data", {"NIGHTSHIFT_STORE_WEBHOOKS_ALLOW_PRIVATE": "true"})


async def create(client: Client, url: str) -> str:
    """Make an endpoint; returns its secret."""
    answer = await webhooks_pb2_grpc.WebhooksStub(client.channel).CreateWebhookEndpoint(
        webhooks_pb2.CreateWebhookEndpointRequest(name="n", url=url, event_types=["batch.failed"]),
        metadata=client.metadata,
    )
    return answer.signing_secret


async def fail(client: Client) -> str:
    """Have a batch fail; returns its id."""
    file = await client.upload(chat_line("same") * 2)
    batch = await client.create(file.id)
    return (await client.settled(batch.id, FAILED)).id


async def delivered(client: Client) -> list[webhooks_pb2.WebhookDelivery]:
    """Return the deliveries once all of them were taken."""
    stub = webhooks_pb2_grpc.WebhooksStub(client.channel)

    async def all_taken() -> list[webhooks_pb2.WebhookDelivery]:
        answer = await stub.ListWebhookDeliveries(
            webhooks_pb2.ListWebhookDeliveriesRequest(), metadata=client.metadata
        )
        found = list(answer.deliveries)
        return found if all(one.state == DELIVERED for one in found) else []

    return await eventually(all_taken)


@pytest.mark.parametrize("answered", [False, True], ids=["before the answer", "unrecorded"])
async def test_a_kill_before_the_record_sends_it_again_under_the_same_id(
    store: StoreProcess, receiver: Receiver, answered: bool
) -> None:
    store.start()
    try:
        client = Client(store)
        await client.ready()
        secret = await create(client, receiver.url)
        receiver.gate.clear()
        batch_id = await fail(client)
        await receiver.got(1)
        assert store.process is not None
        store.process.send_signal(signal.SIGSTOP if answered else signal.SIGKILL)
        receiver.gate.set()
        if answered:
            # Stopped before it could read the answer that the receiver gives now.
            await eventually(lambda: receiver.at_once == 0)
        store.kill()
        store.start()
        requests = await receiver.got(2)
        [delivery] = await delivered(client)
        await client.channel.close()
    finally:
        store.stop()
    assert {request.id for request in requests} == {delivery.id}
    assert delivery.attempts == 2
    for request in requests:
        event = request.unwrap(secret)
        assert (event.type, event.data.id) == ("batch.failed", batch_id)


async def test_what_ended_while_the_receiver_was_away_is_sent_after_a_kill(
    store: StoreProcess, receiver: Receiver
) -> None:
    store.start()
    try:
        client = Client(store)
        await client.ready()
        secret = await create(client, receiver.url)
        receiver.answers.extend([503] * 3)
        ended = {await fail(client) for _ in range(3)}
        await receiver.got(3)
        store.kill()
        store.start()
        requests = await receiver.got(6, within_seconds=30)
        await delivered(client)
        await client.channel.close()
    finally:
        store.stop()
    assert {request.unwrap(secret).data.id for request in requests[3:]} == ended
    log = store.log()
    assert "webhook_attempt" in log
    assert "whsec_" not in log
    assert receiver.url not in log
