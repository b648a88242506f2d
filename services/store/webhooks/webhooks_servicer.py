"""The gRPC service `Webhooks`, in the store."""

import contextlib
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Final

from protos.nightshift.v1 import webhooks_pb2, webhooks_pb2_grpc
from services.kit.calls.interceptors import Call, project_of
from services.kit.wire.errors import InvalidRequestError, UnavailableError
from services.store.admin.audit import record
from services.store.context import Context
from services.store.db.paging import page_of
from services.store.domain import webhooks
from services.store.domain.receivers import Receivers
from services.store.webhooks import deliveries_repo, webhooks_repo
from services.store.webhooks.sender import Message, Sender

DEFAULT_PAGE: Final = 20
MAX_PAGE: Final = 100

TESTS_AT_ONCE: Final = 32
TESTS_OF_PROJECT: Final = 2
_SECRET_BYTES: Final = 32
_STATE_PREFIX: Final = "WEBHOOK_DELIVERY_STATE_"
_SAMPLE_BATCH: Final = f"batch_{0:032x}"


class WebhooksServicer(webhooks_pb2_grpc.WebhooksServicer):
    """Endpoints, and what was sent to them."""

    def __init__(self, context: Context, sender: Sender, receivers: Receivers) -> None:
        """Serve the webhooks of `context`; samples go through `sender`.

        What is known of an endpoint is forgotten in `receivers` when there is reason to try again.
        """
        self._context = context
        self._sender = sender
        self._receivers = receivers
        self._tests: Counter[str] = Counter()

    async def CreateWebhookEndpoint(
        self, request: webhooks_pb2.CreateWebhookEndpointRequest, context: Call
    ) -> webhooks_pb2.CreateWebhookEndpointResponse:
        """See webhooks.proto."""
        project_id = project_of(context)
        webhooks.check_name(request.name)
        self._check_url(request.url)
        event_types = webhooks.check_event_types(request.event_types)
        secret = webhooks.new_secret(secrets.token_bytes(_SECRET_BYTES))
        endpoint_id = f"we_{self._context.new_id()}"
        now_at = self._context.now_ms() // 1000
        row = await self._context.db.write(
            "webhook.create",
            lambda connection: webhooks_repo.insert(
                connection,
                endpoint_id=endpoint_id,
                project_id=project_id,
                name=request.name,
                url=request.url,
                event_types=event_types,
                secret=secret,
                now_at=now_at,
            ),
        )
        record(context, "webhook_made", endpoint=endpoint_id)
        return webhooks_pb2.CreateWebhookEndpointResponse(
            endpoint=endpoint_proto(row), signing_secret=secret
        )

    async def GetWebhookEndpoint(
        self, request: webhooks_pb2.GetWebhookEndpointRequest, context: Call
    ) -> webhooks_pb2.GetWebhookEndpointResponse:
        """See webhooks.proto."""
        project_id = project_of(context)
        row = await self._context.db.read(
            lambda connection: webhooks_repo.get(
                connection, request.webhook_endpoint_id, project_id
            )
        )
        return webhooks_pb2.GetWebhookEndpointResponse(endpoint=endpoint_proto(row))

    async def ListWebhookEndpoints(
        self, request: webhooks_pb2.ListWebhookEndpointsRequest, context: Call
    ) -> webhooks_pb2.ListWebhookEndpointsResponse:
        """See webhooks.proto."""
        project_id = project_of(context)
        page = page_of(request.page, default=DEFAULT_PAGE, most=MAX_PAGE)
        rows, has_more = await self._context.db.read(
            lambda connection: webhooks_repo.list_page(
                connection, project_id=project_id, after=page.after, limit=page.limit
            )
        )
        return webhooks_pb2.ListWebhookEndpointsResponse(
            endpoints=[endpoint_proto(row) for row in rows], has_more=has_more
        )

    async def UpdateWebhookEndpoint(
        self, request: webhooks_pb2.UpdateWebhookEndpointRequest, context: Call
    ) -> webhooks_pb2.UpdateWebhookEndpointResponse:
        """See webhooks.proto."""
        project_id = project_of(context)
        wanted: dict[str, object] = {}
        if request.HasField("name"):
            webhooks.check_name(request.name)
            wanted["name"] = request.name
        if request.HasField("url"):
            self._check_url(request.url)
            wanted["url"] = request.url
        if request.event_types:
            wanted["event_types"] = webhooks.check_event_types(request.event_types)
        now_at = self._context.now_ms() // 1000
        row = await self._context.db.write(
            "webhook.update",
            lambda connection: webhooks_repo.update(
                connection, request.webhook_endpoint_id, project_id, now_at, **wanted
            ),
        )
        if "url" in wanted:
            self._receivers.forget(row.id)
        record(context, "webhook_changed", endpoint=request.webhook_endpoint_id)
        return webhooks_pb2.UpdateWebhookEndpointResponse(endpoint=endpoint_proto(row))

    async def DeleteWebhookEndpoint(
        self, request: webhooks_pb2.DeleteWebhookEndpointRequest, context: Call
    ) -> webhooks_pb2.DeleteWebhookEndpointResponse:
        """See webhooks.proto."""
        project_id = project_of(context)
        now_ms = self._context.now_ms()
        await self._context.db.write(
            "webhook.delete",
            lambda connection: webhooks_repo.delete(
                connection, request.webhook_endpoint_id, project_id, now_ms
            ),
        )
        record(context, "webhook_deleted", endpoint=request.webhook_endpoint_id)
        return webhooks_pb2.DeleteWebhookEndpointResponse(
            webhook_endpoint_id=request.webhook_endpoint_id
        )

    async def RotateWebhookSecret(
        self, request: webhooks_pb2.RotateWebhookSecretRequest, context: Call
    ) -> webhooks_pb2.RotateWebhookSecretResponse:
        """See webhooks.proto."""
        project_id = project_of(context)
        secret = webhooks.new_secret(secrets.token_bytes(_SECRET_BYTES))
        now_ms = self._context.now_ms()
        row = await self._context.db.write(
            "webhook.rotate",
            lambda connection: webhooks_repo.rotate(
                connection,
                request.webhook_endpoint_id,
                project_id,
                secret=secret,
                keep_old=request.keep_old_secret_active_for_24_hours,
                now_ms=now_ms,
            ),
        )
        record(context, "webhook_secret_rotated", endpoint=request.webhook_endpoint_id)
        return webhooks_pb2.RotateWebhookSecretResponse(
            endpoint=endpoint_proto(row), signing_secret=secret
        )

    async def TestWebhookEndpoint(
        self, request: webhooks_pb2.TestWebhookEndpointRequest, context: Call
    ) -> webhooks_pb2.TestWebhookEndpointResponse:
        """See webhooks.proto."""
        project_id = project_of(context)
        [event_type] = webhooks.check_event_types([request.event_type], "event_type")
        row = await self._context.db.read(
            lambda connection: webhooks_repo.get(
                connection, request.webhook_endpoint_id, project_id
            )
        )
        now_ms = self._context.now_ms()
        unique = self._context.new_id()
        message = Message(
            id=f"wh_{unique}",
            url=row.url,
            payload=webhooks.payload(f"evt_{unique}", event_type, _SAMPLE_BATCH, now_ms // 1000),
            secrets=webhooks_repo.live_secrets(row.secrets, now_ms),
        )
        with self._one_test(project_id):
            answer = await self._sender.send(message, self._context.clock.now())
        if answer.status is None:
            raise InvalidRequestError(
                f"The endpoint did not answer: {answer.error}.", code="webhook_test_failed"
            )
        self._receivers.forget(row.id)
        return webhooks_pb2.TestWebhookEndpointResponse(
            webhook_endpoint_id=row.id, event_type=event_type, status_code=answer.status
        )

    async def ListWebhookEventTypes(
        self, request: webhooks_pb2.ListWebhookEventTypesRequest, context: Call
    ) -> webhooks_pb2.ListWebhookEventTypesResponse:
        """See webhooks.proto."""
        return webhooks_pb2.ListWebhookEventTypesResponse(event_types=webhooks.EVENT_TYPES.values())

    async def ListWebhookDeliveries(
        self, request: webhooks_pb2.ListWebhookDeliveriesRequest, context: Call
    ) -> webhooks_pb2.ListWebhookDeliveriesResponse:
        """See webhooks.proto."""
        project_id = project_of(context)
        page = page_of(request.page, default=DEFAULT_PAGE, most=MAX_PAGE)
        state = ""
        if request.state in webhooks_pb2.WebhookDeliveryState.values()[1:]:
            name = webhooks_pb2.WebhookDeliveryState.Name(request.state)
            state = name.removeprefix(_STATE_PREFIX).lower()
        rows, has_more = await self._context.db.read(
            lambda connection: deliveries_repo.list_page(
                connection,
                project_id=project_id,
                endpoint_id=request.webhook_endpoint_id,
                state=state,
                after=page.after,
                limit=page.limit,
            )
        )
        return webhooks_pb2.ListWebhookDeliveriesResponse(
            deliveries=[delivery_proto(row) for row in rows], has_more=has_more
        )

    async def RedeliverWebhook(
        self, request: webhooks_pb2.RedeliverWebhookRequest, context: Call
    ) -> webhooks_pb2.RedeliverWebhookResponse:
        """See webhooks.proto."""
        project_id = project_of(context)
        now_ms = self._context.now_ms()
        rows = await self._context.db.write(
            "webhook.send_again",
            lambda connection: deliveries_repo.send_again(
                connection, request.id, project_id, now_ms
            ),
        )
        for row in rows:
            self._receivers.forget(row.endpoint_id)
        self._context.wake("deliveries")
        return webhooks_pb2.RedeliverWebhookResponse(
            deliveries=[delivery_proto(row) for row in rows]
        )

    @contextlib.contextmanager
    def _one_test(self, project_id: str) -> Iterator[None]:
        """Count a test while it runs.

        Raises:
            UnavailableError: too many run, of the project or in all.
        """
        if self._tests[project_id] >= TESTS_OF_PROJECT:
            raise UnavailableError(
                f"{TESTS_OF_PROJECT} webhook tests of this project run already; try again when one "
                "has ended.",
                retry_after_seconds=1.0,
            )
        if self._tests.total() >= TESTS_AT_ONCE:
            raise UnavailableError(
                "Too many webhook tests run at once; try again.", retry_after_seconds=1.0
            )
        self._tests[project_id] += 1
        try:
            yield
        finally:
            self._tests[project_id] -= 1

    def _check_url(self, url: str) -> None:
        webhooks.check_url(url, allow_private=self._context.settings.webhooks_allow_private)


def endpoint_proto(row: webhooks_repo.Row) -> webhooks_pb2.WebhookEndpoint:
    """Return an endpoint's row as its message, without its secrets."""
    return webhooks_pb2.WebhookEndpoint(
        id=row.id,
        name=row.name,
        url=row.url,
        event_types=row.event_types,
        created_at=row.created_at,
        updated_at=row.updated_at,
        signing_secret_hint=webhooks.hint(row.secrets[0][0]),
    )


def delivery_proto(row: deliveries_repo.Row) -> webhooks_pb2.WebhookDelivery:
    """Return a delivery's row as its message."""
    return webhooks_pb2.WebhookDelivery(
        id=row.id,
        webhook_endpoint_id=row.endpoint_id,
        event_id=row.event_id,
        event_type=row.event_type,
        batch_id=row.batch_id,
        state=webhooks_pb2.WebhookDeliveryState.Value(f"{_STATE_PREFIX}{row.state.upper()}"),
        attempts=row.attempts,
        created_at=row.created_at,
        next_attempt_at=None if row.next_ms is None else row.next_ms // 1000,
        last_status_code=row.last_status,
        last_error=row.last_error,
        ended_at=None if row.ended_ms is None else row.ended_ms // 1000,
    )
