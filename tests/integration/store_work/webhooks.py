"""What the tests of webhooks share: a project with its loop, and ways for a batch to end."""

from typing import Any

from protos.nightshift.v1 import batches_pb2, webhooks_pb2
from services.store.domain import webhooks
from services.store.domain.receivers import Receivers
from services.store.tables.core import projects
from services.store.webhooks.delivery_loop import Deliveries
from services.store.webhooks.sender import Sender
from services.store.webhooks.webhooks_servicer import WebhooksServicer
from tests.integration.store_work.harness import Store
from tests.kit.store import chat_line

ALL = list(webhooks.EVENT_TYPES.values())
HOUR = 3_600
PENDING = webhooks_pb2.WEBHOOK_DELIVERY_STATE_PENDING
DELIVERED = webhooks_pb2.WEBHOOK_DELIVERY_STATE_DELIVERED
GIVEN_UP = webhooks_pb2.WEBHOOK_DELIVERY_STATE_GIVEN_UP


class Project:
    """What a project does with its webhooks, and the store's loop that sends them."""

    def __init__(self, store: Store, sender: Sender, project_id: str = "default") -> None:
        self.store = store
        self.project_id = project_id
        receivers = Receivers()
        self.deliveries = Deliveries(store.context, sender, receivers, chance=lambda: 0.5)
        self.sender = sender
        self._servicer = WebhooksServicer(store.context, sender, receivers)

    async def beside(self, project_id: str) -> "Project":
        """Make another project of the same store, whose loop is this one's."""
        await self.store.context.db.write(
            "test.step",
            lambda connection: connection.execute(
                projects.insert().values(id=project_id, created_at=1)
            ),
        )
        other = Project(self.store, self.sender, project_id)
        other.deliveries, other._servicer = self.deliveries, self._servicer
        return other

    async def call(self, method: str, **fields: Any) -> Any:
        """Call a method of `Webhooks` as the gateway does, errors as our own."""
        request = getattr(webhooks_pb2, f"{method}Request")(**fields)
        return await getattr(self._servicer, method)(request, _Call(self.project_id))

    async def endpoint(self, url: str, event_types: list[str] = ALL) -> Any:
        """Make an endpoint; returns it and its secret."""
        return await self.call("CreateWebhookEndpoint", name="n", url=url, event_types=event_types)

    async def all(self, **fields: Any) -> list[webhooks_pb2.WebhookDelivery]:
        """Return the deliveries, newest first."""
        return list((await self.call("ListWebhookDeliveries", **fields)).deliveries)

    async def one(self) -> webhooks_pb2.WebhookDelivery:
        """Return the only delivery."""
        [delivery] = await self.all()
        return delivery

    async def turn(self) -> int:
        """Let the loop begin what is due, and wait until it ended; returns how many attempts."""
        begun = await self.deliveries.run_once()
        await self.deliveries.settle()
        return begun


class _Call:
    """A fake call: it carries the project, as the gateway's metadata does."""

    def __init__(self, project_id: str) -> None:
        self._project_id = project_id

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("x-nightshift-project", self._project_id)]

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


async def complete(store: Store) -> str:
    batch_id = await store.batch(1)
    (dispatch,) = await store.cut((batch_id, 1))
    token = (await store.open(dispatch)).token
    assert await store.finish(token, [0], batch_id) == 1
    await store.turn()
    assert (await store.get(batch_id)).status == batches_pb2.BATCH_STATUS_COMPLETED
    return batch_id


async def fail(store: Store) -> str:
    batch = await store.create((await store.upload(chat_line("a") * 2)).id)
    await store.turn()
    return batch.id


async def expire(store: Store) -> str:
    batch_id = await store.batch(1, window_seconds=1)
    store.clock.advance(1)
    await store.turn()
    store.clock.advance(2)
    await store.turn()
    return batch_id


async def expire_unvalidated(store: Store) -> str:
    batch = await store.create((await store.upload(chat_line("a"))).id, window_seconds=1)
    store.clock.advance(1)
    await store.ender.run_once()
    return batch.id


async def cancel(store: Store) -> str:
    batch_id = await store.batch(1)
    await store.cancel(batch_id)
    await store.turn()
    return batch_id


async def cancel_unvalidated(store: Store) -> str:
    batch = await store.create((await store.upload(chat_line("a"))).id)
    await store.cancel(batch.id)
    await store.turn()
    return batch.id
