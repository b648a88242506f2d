"""Every end of a batch is told to those who asked, again and again until they take it."""

from typing import Any

import pytest
import sqlalchemy as sa

from services.store.domain import webhooks
from services.store.domain.receivers import (
    FIRST_PAUSE_SECONDS,
    HUNG_TIMES,
    OF_PROJECT,
    UNSURE_OF_PROJECT,
)
from services.store.tables.webhooks import deliveries
from services.store.webhooks import deliveries_repo
from services.store.webhooks.sender import Answer, Message, Sender
from tests.integration.store_work.harness import Store
from tests.integration.store_work.webhooks import (
    DELIVERED,
    GIVEN_UP,
    HOUR,
    PENDING,
    Project,
    cancel,
    cancel_unvalidated,
    complete,
    expire,
    expire_unvalidated,
    fail,
)
from tests.kit.eventually import eventually
from tests.kit.webhook_receiver import Receiver, running_receiver

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.parametrize(
    ("end", "event_type", "ended_at"),
    [
        (complete, "batch.completed", "completed_at"),
        (fail, "batch.failed", "failed_at"),
        (expire, "batch.expired", "expired_at"),
        (expire_unvalidated, "batch.expired", "expired_at"),
        (cancel, "batch.cancelled", "cancelled_at"),
        (cancel_unvalidated, "batch.cancelled", "cancelled_at"),
    ],
)
async def test_each_end_is_one_signed_event(
    store: Store, project: Project, receiver: Receiver, end: Any, event_type: str, ended_at: str
) -> None:
    secret = (await project.endpoint(f"{receiver.url}/hook")).signing_secret
    batch_id = await end(store)
    assert await project.turn() == 1
    assert await project.turn() == 0
    [request] = receiver.received
    event = request.unwrap(secret)
    batch = await store.get(batch_id)
    assert (event.type, event.data.id, event.object) == (event_type, batch_id, "event")
    assert event.created_at == getattr(batch, ended_at) > 0
    delivery = await project.one()
    assert (delivery.state, delivery.attempts, delivery.last_status_code) == (DELIVERED, 1, 204)
    assert (delivery.event_id, delivery.id) == (event.id, request.id)
    assert not delivery.HasField("last_error")
    assert not delivery.HasField("next_attempt_at")


async def test_a_batch_that_has_not_ended_is_told_to_nobody(
    store: Store, project: Project, receiver: Receiver
) -> None:
    await project.endpoint(receiver.url)
    batch_id = await store.batch(1)
    await store.turn()
    assert await project.turn() == 0
    await store.cancel(batch_id)
    assert await project.all() == []


async def test_an_end_that_is_rolled_back_is_told_to_nobody(store: Store, project: Project) -> None:
    await project.endpoint("http://127.0.0.1:1")
    batch_id = await store.batch(1)

    def end_and_fail(connection: sa.Connection) -> None:
        deliveries_repo.add(
            connection,
            batch_id=batch_id,
            project_id=project.project_id,
            end=next(iter(webhooks.EVENT_TYPES)),
            now_ms=1,
        )
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await store.context.db.write("test.step", end_and_fail)
    assert await project.all() == []


async def test_only_those_who_asked_are_told(
    store: Store, project: Project, receiver: Receiver
) -> None:
    await project.endpoint(f"{receiver.url}/failed", ["batch.failed"])
    await project.endpoint(f"{receiver.url}/all")
    gone = await project.endpoint(f"{receiver.url}/gone")
    await project.call("DeleteWebhookEndpoint", webhook_endpoint_id=gone.endpoint.id)
    await complete(store)
    await project.turn()
    assert [request.path for request in receiver.received] == ["/all"]
    await fail(store)
    assert await project.turn() == 2
    assert sorted(request.path for request in receiver.received) == ["/all", "/all", "/failed"]
    first, second = receiver.received[1:]
    assert first.body == second.body
    assert first.id != second.id


async def test_a_failure_is_tried_again_under_the_same_id_until_it_is_taken(
    store: Store, project: Project, receiver: Receiver
) -> None:
    secret = (await project.endpoint(receiver.url)).signing_secret
    receiver.answers.extend([500, 302, 404])
    await complete(store)
    assert await project.turn() == 1
    delivery = await project.one()
    assert (delivery.state, delivery.last_status_code) == (PENDING, 500)
    assert delivery.last_error == "HTTP status 500"
    # Half of the wait and a half of the other half, by this test's chance.
    assert await project.turn() == 0
    store.clock.advance(3.74)
    assert await project.turn() == 0
    for wait in (0.02, 7.5, 15):
        store.clock.advance(wait)
        assert await project.turn() == 1
    assert len({request.id for request in receiver.received}) == 1
    assert len({request.body for request in receiver.received}) == 1
    stamps = [int(request.headers["webhook-timestamp"]) for request in receiver.received]
    assert stamps == sorted(set(stamps))
    assert {request.path for request in receiver.received} == {"/"}
    assert receiver.received[-1].unwrap(secret).type == "batch.completed"
    delivery = await project.one()
    assert (delivery.state, delivery.attempts) == (DELIVERED, 4)


async def test_after_72_hours_it_is_given_up_and_can_be_sent_again(
    store: Store, project: Project, receiver: Receiver
) -> None:
    await project.endpoint(receiver.url)
    receiver.answers.extend([503] * 100)
    await complete(store)
    began = store.clock.now()
    while (await project.one()).state == PENDING:
        due = (await store.sql(sa.select(deliveries.c.next_ms)))[0].next_ms
        store.clock.advance(max(0.0, due / 1000 - store.clock.now() + 0.001))
        assert await project.turn() == 1
    assert 72 * HOUR <= store.clock.now() - began < 72 * HOUR + 1
    delivery = await project.one()
    assert (delivery.state, delivery.last_error) == (GIVEN_UP, "HTTP status 503")
    tried = len(receiver.received)
    assert 20 < delivery.attempts == tried < 50
    store.clock.advance(24 * HOUR)
    assert await project.turn() == 0

    receiver.answers.clear()
    again = await project.call("RedeliverWebhook", id=delivery.event_id)
    assert [each.state for each in again.deliveries] == [PENDING]
    assert await project.turn() == 1
    assert (await project.one()).state == DELIVERED
    assert receiver.received[-1].id == receiver.received[0].id == delivery.id
    # One that was taken may be asked for again as well, by its own id.
    await project.call("RedeliverWebhook", id=delivery.id)
    assert await project.turn() == 1
    assert len(receiver.received) == tried + 2


async def test_sending_again_during_an_attempt_outlives_its_failure(
    store: Store, project: Project, receiver: Receiver
) -> None:
    await project.endpoint(receiver.url)
    receiver.answers.extend([500])
    receiver.gate.clear()
    await complete(store)
    assert await project.deliveries.run_once() == 1
    await receiver.got(1)
    store.clock.advance(1)
    await project.call("RedeliverWebhook", id=(await project.one()).id)
    # It is being sent: not twice at once.
    assert await project.deliveries.run_once() == 0
    receiver.gate.set()
    await project.deliveries.settle()
    assert await project.turn() == 1
    assert (await project.one()).state == DELIVERED


async def test_receivers_that_hang_hold_up_no_other_project(
    store: Store, project: Project, receiver: Receiver
) -> None:
    receiver.gate.clear()
    for number in range(8):
        await project.endpoint(f"{receiver.url}/{number}")
    for _ in range(5):
        await fail(store)
    assert await project.deliveries.run_once() == UNSURE_OF_PROJECT
    await receiver.got(UNSURE_OF_PROJECT)
    store.project_id = "bob"
    bob = await project.beside("bob")
    async with running_receiver() as quick:
        await bob.endpoint(quick.url)
        for _ in range(2):
            await fail(store)
        # Also behind all that waits: the first alone, and the other as soon as that was answered.
        for number in (1, 2):
            assert await project.deliveries.run_once() == 1
            await quick.got(number)
            await eventually(lambda: project.deliveries.sending == UNSURE_OF_PROJECT)
    receiver.gate.set()
    await project.deliveries.settle()
    while await project.turn():
        pass
    assert await project.all(state=PENDING) == await bob.all(state=PENDING) == []
    assert len(receiver.received) == 8 * 5
    assert receiver.most_at_once <= OF_PROJECT


class _Hanging(Sender):
    """Waits 15 seconds of the test's clock for nothing, as long as `hangs`."""

    hangs = True

    def __init__(self, store: Store) -> None:
        super().__init__(allow_private=True)
        self.waited = 0
        self._clock = store.clock

    async def send(self, message: Message, now: float) -> Answer:
        if not self.hangs:
            return await super().send(message, now)
        self.waited += 1
        self._clock.advance(15)
        return Answer(status=None, error="no answer")


async def test_an_endpoint_that_hangs_gets_one_attempt_after_each_pause(
    store: Store, project: Project, receiver: Receiver
) -> None:
    async with _Hanging(store) as sender:
        project = Project(store, sender)
        made = await project.endpoint(receiver.url)
        for _ in range(HUNG_TIMES + 3):
            await fail(store)

        async def waited() -> int:
            before = sender.waited
            while await project.turn():
                pass
            return sender.waited - before

        assert await waited() == HUNG_TIMES
        store.clock.advance(FIRST_PAUSE_SECONDS)
        assert await waited() == 1
        # The pause grows, and asking for an event again ends it.
        store.clock.advance(FIRST_PAUSE_SECONDS)
        assert await waited() == 0
        await project.call("RedeliverWebhook", id=(await project.all())[0].id)
        assert await waited() == HUNG_TIMES
        # What has waited for 72 hours is given up with one attempt, not one after another.
        store.clock.advance(72 * HOUR)
        await fail(store)
        assert await waited() == 1
        assert [one.state for one in await project.all()] == [PENDING] + [GIVEN_UP] * 6
        # A test that is answered ends the pause as well.
        sender.hangs = False
        assert await project.turn() == 0
        await project.call(
            "TestWebhookEndpoint", webhook_endpoint_id=made.endpoint.id, event_type="batch.failed"
        )
        assert await project.turn() == 1
        assert (await project.all())[0].state == DELIVERED


async def test_a_lease_keeps_others_away_until_it_lapses(
    store: Store, project: Project, receiver: Receiver
) -> None:
    await project.endpoint(receiver.url)
    await complete(store)
    [row] = await store.sql(sa.select(deliveries.c.id))

    async def claim(holder: str, *, only_store: bool = False) -> int:
        rows = await store.context.db.write(
            "test.step",
            lambda connection: deliveries_repo.claim(
                connection,
                [row.id],
                holder=holder,
                now_ms=store.context.now_ms(),
                lease_ms=60_000,
                others_dead=lambda _, named: named != holder if only_store else sa.false(),
            ),
        )
        return len(rows)

    assert await claim("a") == 1
    assert await claim("a") == 0
    assert await claim("b") == 0
    store.clock.advance(60)
    assert await claim("b") == 1
    # Only one store works on SQLite: whoever else holds a lease there is dead.
    assert await claim("c", only_store=True) == 1
    assert await claim("c", only_store=True) == 0
    # What another has begun since is not this one's to record.
    attempt = (await store.sql(sa.select(deliveries)))[0]
    late = await store.context.db.write(
        "test.step",
        lambda connection: deliveries_repo.record(
            connection, attempt, holder="b", status=500, error="late", next_ms=1, now_ms=1
        ),
    )
    assert not late


async def test_ended_deliveries_are_forgotten_after_30_days(
    store: Store, project: Project, receiver: Receiver
) -> None:
    await project.endpoint(receiver.url)
    await complete(store)
    await project.turn()
    receiver.answers.append(500)
    store.clock.advance(29 * 24 * HOUR)
    await store.sweeper.run_once()
    assert len(await project.all()) == 1
    await fail(store)
    await project.turn()
    store.clock.advance(24 * HOUR)
    await store.sweeper.run_once()
    # The one that still waits stays.
    assert (await project.one()).state == PENDING


async def test_stopping_cuts_a_slow_attempt_off_and_it_is_made_again(
    store: Store, project: Project, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.store.webhooks.delivery_loop._DRAIN_SECONDS", 0.05)
    await project.endpoint(receiver.url)
    await complete(store)
    receiver.gate.clear()
    assert await project.deliveries.run_once() == 1
    await receiver.got(1)
    await project.deliveries.close()
    assert (await project.one()).state == PENDING
    receiver.gate.set()
    # The next store on these files knows that whoever held the lease is gone.
    monkeypatch.setattr(store.context.db._dialect, "holder", "the next store")
    successor = Project(store, project.sender)
    assert await successor.turn() == 1
    assert receiver.received[0].id == receiver.received[1].id
    assert (await project.one()).state == DELIVERED
