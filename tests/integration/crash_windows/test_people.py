"""A store dies, or stands still, at each step of what people set, and of what is told to them."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protos.nightshift.v1 import admin_pb2, models_pb2, webhooks_pb2, webhooks_pb2_grpc
from services.kit.wire.errors import NotFoundError
from tests.integration.crash_windows import hands
from tests.integration.crash_windows.backings import migrated_database, postgres, shared
from tests.integration.crash_windows.stories import Stories
from tests.integration.crash_windows.world import Asker, Backing, Check, World
from tests.kit.store import POOL, chat_line, our_errors
from tests.kit.template import Template, template
from tests.kit.webhook_receiver import Receiver, running_receiver

__all__ = ["migrated_database", "postgres", "shared", "template"]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

stories = Stories()
DELIVERED = webhooks_pb2.WEBHOOK_DELIVERY_STATE_DELIVERED


async def put_model(asker: Asker) -> None:
    request = admin_pb2.PutModelsRequest(models=[models_pb2.Model(id="m", pool_id=POOL)])
    with our_errors():
        await asker.admin.PutModels(request, metadata=asker.metadata)


async def models(asker: Asker) -> list[str]:
    with our_errors():
        answer = await asker.models.ListModels(
            models_pb2.ListModelsRequest(), metadata=asker.metadata
        )
    return [model.id for model in answer.models]


@stories.windows("models.put")
async def new_model(world: World) -> Check:
    """A model is there once that was answered."""
    await world.start()
    await world.arm()
    await world.do(put_model)

    async def check() -> None:
        assert "m" in await world.do(models)

    return check


@stories.windows("models.delete")
async def deleted_model(world: World) -> Check:
    """A model that was deleted stays away."""
    await world.start()
    await world.do(put_model)
    await world.arm()

    async def delete(asker: Asker) -> None:
        request = admin_pb2.DeleteModelRequest(model_id="m")
        with contextlib.suppress(NotFoundError), our_errors():
            await asker.admin.DeleteModel(request, metadata=asker.metadata)

    await world.do(delete)

    async def check() -> None:
        assert "m" not in await world.do(models)

    return check


@stories.windows("key.create", "key.revoke")
async def keys(world: World) -> Check:
    """A key that was revoked is never good again."""
    await world.start()
    await world.arm()

    async def create(asker: Asker) -> admin_pb2.CreateKeyResponse:
        request = admin_pb2.CreateKeyRequest(project_id="p", name="n")
        with our_errors():
            return await asker.admin.CreateKey(request, metadata=asker.metadata)

    async def revoke(asker: Asker) -> None:
        request = admin_pb2.RevokeKeyRequest(key_id=made.key.id)
        with our_errors():
            await asker.admin.RevokeKey(request, metadata=asker.metadata)

    async def live(asker: Asker) -> dict[str, bool]:
        with our_errors():
            answer = await asker.admin.ListKeys(
                admin_pb2.ListKeysRequest(project_id="p"), metadata=asker.metadata
            )
        return {key.id: not key.HasField("revoked_at") for key in answer.keys}

    made = await world.do(create)
    assert (await world.do(live))[made.key.id]
    await world.do(revoke)

    async def check() -> None:
        assert (await world.do(live))[made.key.id] is False

    return check


@stories.windows("project.set_quota")
async def quota(world: World) -> Check:
    """A quota that was set holds."""
    await world.start()
    await world.arm()

    async def put(asker: Asker) -> None:
        request = admin_pb2.SetProjectQuotaRequest(project_id=asker.project_id, quota_bytes=10)
        with our_errors():
            await asker.admin.SetProjectQuota(request, metadata=asker.metadata)

    await world.do(put)

    async def check() -> None:
        with pytest.raises(Exception, match="quota"):
            await world.do(lambda asker: asker.upload(chat_line("r0")))

    return check


# --- webhooks -------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def receiving(world: World) -> AsyncIterator[Receiver]:
    """Run a receiver that the world's stores may call."""
    world.set(NIGHTSHIFT_STORE_WEBHOOKS_ALLOW_PRIVATE="true")
    async with running_receiver() as receiver:
        yield receiver


def stub(asker: Asker) -> "webhooks_pb2_grpc.WebhooksAsyncStub":
    return webhooks_pb2_grpc.WebhooksStub(asker.channel)


async def endpoint(world: World, url: str) -> webhooks_pb2.CreateWebhookEndpointResponse:
    async def create(asker: Asker) -> webhooks_pb2.CreateWebhookEndpointResponse:
        request = webhooks_pb2.CreateWebhookEndpointRequest(
            name="n", url=url, event_types=["batch.failed"]
        )
        with our_errors():
            return await stub(asker).CreateWebhookEndpoint(request, metadata=asker.metadata)

    return await world.do(create)


async def endpoints(asker: Asker) -> list[webhooks_pb2.WebhookEndpoint]:
    with our_errors():
        answer = await stub(asker).ListWebhookEndpoints(
            webhooks_pb2.ListWebhookEndpointsRequest(), metadata=asker.metadata
        )
    return list(answer.endpoints)


async def deliveries(asker: Asker) -> list[webhooks_pb2.WebhookDelivery]:
    with our_errors():
        answer = await stub(asker).ListWebhookDeliveries(
            webhooks_pb2.ListWebhookDeliveriesRequest(), metadata=asker.metadata
        )
    return list(answer.deliveries)


async def all_delivered(world: World) -> bool:
    found = await world.do(deliveries)
    return bool(found) and all(one.state == DELIVERED for one in found)


async def fail_a_batch(world: World) -> None:
    file = await world.created(lambda asker: asker.upload(chat_line("same") * 2))
    batch = await world.created(lambda asker: asker.create(file.id))
    failed = hands.batches_pb2.BATCH_STATUS_FAILED
    await world.until(lambda: hands.status_is(world, batch.id, failed))


@stories.windows("webhook.create", "webhook.update", "webhook.rotate", "webhook.delete")
async def endpoints_of_webhooks(world: World) -> Check:
    """What was answered holds; what was not may be asked again."""
    await world.start()
    await world.arm()
    url = "https://example.com/hook"
    made = (await endpoint(world, url)).endpoint.id

    async def update(asker: Asker) -> None:
        request = webhooks_pb2.UpdateWebhookEndpointRequest(webhook_endpoint_id=made, name="new")
        with our_errors():
            await stub(asker).UpdateWebhookEndpoint(request, metadata=asker.metadata)

    async def rotate(asker: Asker) -> str:
        request = webhooks_pb2.RotateWebhookSecretRequest(webhook_endpoint_id=made)
        with our_errors():
            answer = await stub(asker).RotateWebhookSecret(request, metadata=asker.metadata)
        return answer.signing_secret

    async def delete(asker: Asker) -> None:
        request = webhooks_pb2.DeleteWebhookEndpointRequest(webhook_endpoint_id=made)
        with contextlib.suppress(NotFoundError), our_errors():
            await stub(asker).DeleteWebhookEndpoint(request, metadata=asker.metadata)

    await world.do(update)
    assert "new" in {one.name for one in await world.do(endpoints) if one.id == made}
    assert (await world.do(rotate)).startswith("whsec_")
    await world.do(delete)

    async def check() -> None:
        assert made not in {one.id for one in await world.do(endpoints)}

    return check


@stories.windows("delivery.claim", "delivery.record")
async def deliveries_of_webhooks(world: World) -> Check:
    """Told at least once, under one id, with the secret that was shown."""
    async with receiving(world) as receiver:
        await world.start()
        secret = (await endpoint(world, receiver.url)).signing_secret
        await world.arm()
        await fail_a_batch(world)
        await world.until(lambda: all_delivered(world))
        await world.until(lambda: world.reached)
        assert len({one.id for one in receiver.received}) == 1
        receiver.received[0].unwrap(secret)

    async def check() -> None:
        assert await all_delivered(world)
        assert len(await world.do(deliveries)) == 1

    return check


@stories.windows("webhook.send_again")
async def sent_again(world: World) -> Check:
    """What is asked for again is sent again, under the same id."""
    async with receiving(world) as receiver:
        await world.start()
        await endpoint(world, receiver.url)
        await fail_a_batch(world)
        await world.until(lambda: all_delivered(world))
        (first,) = await world.do(deliveries)
        await world.arm()

        async def again(asker: Asker) -> None:
            request = webhooks_pb2.RedeliverWebhookRequest(id=first.id)
            with our_errors():
                await stub(asker).RedeliverWebhook(request, metadata=asker.metadata)

        await world.do(again)
        await world.until(lambda: len(receiver.received) >= 2)
        await world.until(lambda: all_delivered(world))
        assert {one.id for one in receiver.received} == {first.id}

    async def check() -> None:
        assert len(await world.do(deliveries)) == 1

    return check


@pytest.mark.parametrize("name", stories.names())
async def test_killed(name: str, template: Template, tmp_path: Path) -> None:
    await stories.killed(name, template, tmp_path)


@pytest.mark.parametrize("name", stories.names())
async def test_frozen(name: str, template: Template, tmp_path: Path, shared: Backing) -> None:
    await stories.frozen(name, template, tmp_path, shared)
