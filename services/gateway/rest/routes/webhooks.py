"""/v1/webhook_endpoints, /v1/webhook_event_types, and what was delivered."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protos.nightshift.v1 import common_pb2, webhooks_pb2
from services.gateway import checks
from services.gateway.auth import Caller
from services.gateway.context import Context
from services.gateway.rest import webhook_objects
from services.gateway.rest.envelope import JsonResponse, list_object
from services.gateway.rest.routes.resource import Handler, read_body, resource

DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 100


class WebhookRoutes:
    """Routes of webhooks. Deliveries are an extension of ours."""

    def __init__(self, context: Context) -> None:
        """Serve the webhooks of `context`'s store."""
        self._context = context
        self._store = context.store

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = "/v1/webhook_endpoints/{endpoint_id}"
        deliveries = "/v1/webhook_deliveries"
        paths: dict[str, dict[str, Handler]] = {
            "/v1/webhook_endpoints": {"GET": self.list, "POST": self.create},
            one: {"GET": self.get, "POST": self.update, "DELETE": self.delete},
            f"{one}/rotate_secret": {"POST": self.rotate_secret},
            f"{one}/test": {"POST": self.test},
            "/v1/webhook_event_types": {"GET": self.event_types},
            deliveries: {"GET": self.list_deliveries},
            f"{deliveries}/{{delivery_id}}/redeliver": {"POST": self.redeliver},
        }
        return [
            route
            for path, handlers in paths.items()
            for route in resource(self._context, path, handlers)
        ]

    async def create(self, request: Request, caller: Caller) -> Response:
        """Make an endpoint; its secret is shown this once."""
        wanted = webhook_objects.parse_create(await read_body(request))
        answer = await self._store.call(self._store.webhooks.CreateWebhookEndpoint, wanted, caller)
        return _with_secret(answer.endpoint, answer.signing_secret)

    async def get(self, request: Request, caller: Caller) -> Response:
        """Read one endpoint."""
        wanted = webhooks_pb2.GetWebhookEndpointRequest(webhook_endpoint_id=_endpoint_id(request))
        answer = await self._store.call(self._store.webhooks.GetWebhookEndpoint, wanted, caller)
        return JsonResponse(webhook_objects.endpoint_object(answer.endpoint))

    async def list(self, request: Request, caller: Caller) -> Response:
        """List endpoints, newest first."""
        wanted = webhooks_pb2.ListWebhookEndpointsRequest(page=_page(request))
        if wanted.page.after:
            webhook_objects.endpoint_id_of(wanted.page.after)
        answer = await self._store.call(self._store.webhooks.ListWebhookEndpoints, wanted, caller)
        items = list(map(webhook_objects.endpoint_object, answer.endpoints))
        return JsonResponse(list_object(items, has_more=answer.has_more))

    async def update(self, request: Request, caller: Caller) -> Response:
        """Change an endpoint."""
        endpoint_id = _endpoint_id(request)
        wanted = webhook_objects.parse_update(endpoint_id, await read_body(request))
        answer = await self._store.call(self._store.webhooks.UpdateWebhookEndpoint, wanted, caller)
        return JsonResponse(webhook_objects.endpoint_object(answer.endpoint))

    async def delete(self, request: Request, caller: Caller) -> Response:
        """Delete an endpoint."""
        wanted = webhooks_pb2.DeleteWebhookEndpointRequest(
            webhook_endpoint_id=_endpoint_id(request)
        )
        answer = await self._store.call(self._store.webhooks.DeleteWebhookEndpoint, wanted, caller)
        return JsonResponse(
            {
                "id": answer.webhook_endpoint_id,
                "object": "webhook_endpoint.deleted",
                "deleted": True,
            }
        )

    async def rotate_secret(self, request: Request, caller: Caller) -> Response:
        """Make a new secret; it is shown this once."""
        endpoint_id = _endpoint_id(request)
        wanted = webhook_objects.parse_rotate(endpoint_id, await read_body(request))
        answer = await self._store.call(self._store.webhooks.RotateWebhookSecret, wanted, caller)
        return _with_secret(answer.endpoint, answer.signing_secret)

    async def test(self, request: Request, caller: Caller) -> Response:
        """Send a sample event, and say what the endpoint answered."""
        endpoint_id = _endpoint_id(request)
        wanted = webhook_objects.parse_test(endpoint_id, await read_body(request))
        answer = await self._store.call(self._store.webhooks.TestWebhookEndpoint, wanted, caller)
        return JsonResponse(
            {
                "object": "webhook_endpoint.test",
                "webhook_endpoint_id": answer.webhook_endpoint_id,
                "event_type": answer.event_type,
                "status_code": answer.status_code,
                "success": True,
            }
        )

    async def event_types(self, _request: Request, caller: Caller) -> Response:
        """List the types of events."""
        answer = await self._store.call(
            self._store.webhooks.ListWebhookEventTypes,
            webhooks_pb2.ListWebhookEventTypesRequest(),
            caller,
        )
        return JsonResponse({"object": "list", "data": list(answer.event_types)})

    async def list_deliveries(self, request: Request, caller: Caller) -> Response:
        """List deliveries, newest first."""
        query = request.query_params
        wanted = webhooks_pb2.ListWebhookDeliveriesRequest(
            page=_page(request),
            webhook_endpoint_id=query.get("webhook_endpoint_id", ""),
            state=webhook_objects.state_of(query),
        )
        if wanted.page.after:
            webhook_objects.delivery_id_of(wanted.page.after)
        if wanted.webhook_endpoint_id:
            webhook_objects.endpoint_id_of(wanted.webhook_endpoint_id)
        answer = await self._store.call(self._store.webhooks.ListWebhookDeliveries, wanted, caller)
        return _deliveries(answer.deliveries, has_more=answer.has_more)

    async def redeliver(self, request: Request, caller: Caller) -> Response:
        """Send a delivery, or all of an event, again."""
        wanted = webhooks_pb2.RedeliverWebhookRequest(
            id=webhook_objects.delivery_id_of(request.path_params["delivery_id"])
        )
        answer = await self._store.call(self._store.webhooks.RedeliverWebhook, wanted, caller)
        return _deliveries(answer.deliveries, has_more=False)


def _endpoint_id(request: Request) -> str:
    return webhook_objects.endpoint_id_of(request.path_params["endpoint_id"])


def _page(request: Request) -> common_pb2.PageRequest:
    query = request.query_params
    limit = checks.limit_of(query, default=DEFAULT_LIMIT, maximum=MAX_LIMIT)
    return common_pb2.PageRequest(after=query.get("after", ""), limit=limit)


def _with_secret(endpoint: webhooks_pb2.WebhookEndpoint, secret: str) -> Response:
    return JsonResponse({**webhook_objects.endpoint_object(endpoint), "signing_secret": secret})


def _deliveries(deliveries: Any, *, has_more: bool) -> Response:
    items = [webhook_objects.delivery_object(delivery) for delivery in deliveries]
    return JsonResponse(list_object(items, has_more=has_more))
