"""Endpoints, their secrets and their lists, and that each project has only its own."""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from protos.nightshift.v1 import common_pb2
from services.kit.wire.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from services.store.tables.webhooks import webhook_endpoints
from services.store.webhooks.webhooks_servicer import TESTS_OF_PROJECT
from tests.integration.store_work.harness import Store
from tests.integration.store_work.webhooks import (
    ALL,
    DELIVERED,
    GIVEN_UP,
    HOUR,
    PENDING,
    Project,
    complete,
    fail,
)
from tests.kit.webhook_receiver import Receiver

pytestmark = pytest.mark.integration


async def test_rotation_signs_with_both_secrets_for_24_hours(
    store: Store, project: Project, receiver: Receiver
) -> None:
    made = await project.endpoint(receiver.url)
    where = {"webhook_endpoint_id": made.endpoint.id}
    rotated = await project.call(
        "RotateWebhookSecret", **where, keep_old_secret_active_for_24_hours=True
    )
    old, new = made.signing_secret, rotated.signing_secret
    assert old != new
    assert rotated.endpoint.signing_secret_hint != made.endpoint.signing_secret_hint

    async def signatures() -> int:
        await fail(store)
        await project.turn()
        return len(receiver.received[-1].headers["webhook-signature"].split())

    assert await signatures() == 2
    for secret in (old, new):
        assert receiver.received[-1].unwrap(secret).type == "batch.failed"
    store.clock.advance(24 * HOUR)
    assert await signatures() == 1
    newest = await project.call("RotateWebhookSecret", **where)
    assert await signatures() == 1
    assert newest.signing_secret not in (old, new)


async def test_so_many_live_secrets_are_enough(project: Project) -> None:
    made = await project.endpoint("http://127.0.0.1:1")
    where = {"webhook_endpoint_id": made.endpoint.id}
    for _ in range(9):
        await project.call("RotateWebhookSecret", **where, keep_old_secret_active_for_24_hours=True)
    with pytest.raises(ConflictError, match="10 secrets"):
        await project.call("RotateWebhookSecret", **where, keep_old_secret_active_for_24_hours=True)
    await project.call("RotateWebhookSecret", **where)


async def test_what_waits_goes_where_the_endpoint_is_now(
    store: Store, project: Project, receiver: Receiver
) -> None:
    made = await project.endpoint(f"{receiver.url}/old")
    await complete(store)
    await project.call(
        "UpdateWebhookEndpoint", webhook_endpoint_id=made.endpoint.id, url=f"{receiver.url}/new"
    )
    await project.turn()
    assert [request.path for request in receiver.received] == ["/new"]


async def test_deleting_an_endpoint_gives_up_what_waits_and_forgets_its_secret(
    store: Store, project: Project, receiver: Receiver
) -> None:
    made = await project.endpoint(receiver.url)
    await complete(store)
    await project.call("DeleteWebhookEndpoint", webhook_endpoint_id=made.endpoint.id)
    assert await project.turn() == 0
    delivery = await project.one()
    assert (delivery.state, delivery.last_error) == (GIVEN_UP, "the endpoint was deleted")
    with pytest.raises(ConflictError, match="deleted"):
        await project.call("RedeliverWebhook", id=delivery.id)
    assert (await store.sql(sa.select(webhook_endpoints.c.secrets)))[0].secrets == []
    for method in ("Get", "Update", "Delete", "Test"):
        with pytest.raises(NotFoundError):
            await project.call(
                f"{method}WebhookEndpoint",
                webhook_endpoint_id=made.endpoint.id,
                **({"event_type": ALL[0]} if method == "Test" else {}),
            )


async def test_another_projects_webhooks_are_unknown_and_not_told(
    store: Store, project: Project, receiver: Receiver
) -> None:
    made = await project.endpoint(receiver.url)
    await complete(store)
    await project.turn()
    delivery = await project.one()
    other = await project.beside("other")
    where = {"webhook_endpoint_id": made.endpoint.id}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("GetWebhookEndpoint", where),
        ("UpdateWebhookEndpoint", where),
        ("DeleteWebhookEndpoint", where),
        ("RotateWebhookSecret", where),
        ("TestWebhookEndpoint", {**where, "event_type": ALL[0]}),
        ("RedeliverWebhook", {"id": delivery.id}),
        ("RedeliverWebhook", {"id": delivery.event_id}),
        ("ListWebhookEndpoints", {"page": common_pb2.PageRequest(after=made.endpoint.id)}),
        ("ListWebhookDeliveries", {"page": common_pb2.PageRequest(after=delivery.id)}),
    ]
    for method, fields in calls:
        with pytest.raises(NotFoundError):
            await other.call(method, **fields)
    assert await other.all() == []
    assert await other.all(webhook_endpoint_id=made.endpoint.id) == []
    assert list((await other.call("ListWebhookEndpoints")).endpoints) == []
    assert (await project.call("GetWebhookEndpoint", **where)).endpoint == made.endpoint


async def test_lists_page_newest_first_and_over_what_was_deleted(
    store: Store, project: Project
) -> None:
    made = [(await project.endpoint("http://127.0.0.1:1")).endpoint for _ in range(3)]

    async def page(after: str, limit: int = 2) -> tuple[list[str], bool]:
        answer = await project.call(
            "ListWebhookEndpoints", page=common_pb2.PageRequest(after=after, limit=limit)
        )
        return [endpoint.id for endpoint in answer.endpoints], answer.has_more

    assert await page("") == ([made[2].id, made[1].id], True)
    await project.call("DeleteWebhookEndpoint", webhook_endpoint_id=made[1].id)
    assert await page(made[1].id) == ([made[0].id], False)
    for _ in range(2):
        await fail(store)
    newest_first = await project.all()
    assert len(newest_first) == 4
    assert newest_first[0].event_id > newest_first[-1].event_id
    assert len(await project.all(webhook_endpoint_id=made[0].id)) == 2
    assert len(await project.all(state=PENDING)) == 4
    assert await project.all(state=DELIVERED) == []
    rest = await project.all(page=common_pb2.PageRequest(after=newest_first[1].id, limit=5))
    assert rest == newest_first[2:]


async def test_updates_show_only_when_something_changed(store: Store, project: Project) -> None:
    made = (await project.endpoint("http://127.0.0.1:1", ["batch.failed"])).endpoint
    assert made.updated_at == made.created_at
    store.clock.advance(10)
    same = await project.call(
        "UpdateWebhookEndpoint", webhook_endpoint_id=made.id, name="n", event_types=["batch.failed"]
    )
    assert same.endpoint == made
    changed = await project.call("UpdateWebhookEndpoint", webhook_endpoint_id=made.id, name="m")
    assert changed.endpoint.updated_at == made.created_at + 10
    assert (changed.endpoint.name, changed.endpoint.url) == ("m", made.url)


async def test_a_test_tells_what_the_endpoint_answered_and_leaves_nothing(
    project: Project, receiver: Receiver
) -> None:
    made = await project.endpoint(receiver.url, ["batch.failed"])
    receiver.answers.extend([201, 500])
    fields = {"webhook_endpoint_id": made.endpoint.id, "event_type": "batch.completed"}
    assert (await project.call("TestWebhookEndpoint", **fields)).status_code == 201
    assert (await project.call("TestWebhookEndpoint", **fields)).status_code == 500
    assert receiver.received[0].unwrap(made.signing_secret).type == "batch.completed"
    assert receiver.received[0].id != receiver.received[1].id
    await project.call(
        "UpdateWebhookEndpoint",
        webhook_endpoint_id=made.endpoint.id,
        url="http://nobody.invalid/",
    )
    with pytest.raises(InvalidRequestError, match="did not answer") as refused:
        await project.call("TestWebhookEndpoint", **fields)
    assert refused.value.code == "webhook_test_failed"
    assert await project.all() == []


async def test_one_projects_tests_leave_room_for_others(
    store: Store, project: Project, receiver: Receiver
) -> None:
    receiver.gate.clear()

    async def test(of: Project, endpoint_id: str) -> int:
        answer = await of.call(
            "TestWebhookEndpoint", webhook_endpoint_id=endpoint_id, event_type="batch.failed"
        )
        return int(answer.status_code)

    mine = (await project.endpoint(receiver.url)).endpoint.id
    running = [asyncio.create_task(test(project, mine)) for _ in range(TESTS_OF_PROJECT)]
    await receiver.got(TESTS_OF_PROJECT)
    with pytest.raises(UnavailableError, match="of this project"):
        await test(project, mine)
    other = await project.beside("other")
    theirs = (await other.endpoint(receiver.url)).endpoint.id
    running.append(asyncio.create_task(test(other, theirs)))
    await receiver.got(TESTS_OF_PROJECT + 1)
    receiver.gate.set()
    assert await asyncio.gather(*running) == [204] * (TESTS_OF_PROJECT + 1)
    assert await test(project, mine) == 204


async def test_a_project_has_a_bounded_number_of_endpoints(project: Project) -> None:
    made = [await project.endpoint("http://127.0.0.1:1") for _ in range(20)]
    with pytest.raises(InvalidRequestError, match="at most 20"):
        await project.endpoint("http://127.0.0.1:1")
    await project.call("DeleteWebhookEndpoint", webhook_endpoint_id=made[0].endpoint.id)
    await project.endpoint("http://127.0.0.1:1")
