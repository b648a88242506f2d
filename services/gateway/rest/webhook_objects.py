"""Webhooks between JSON and the wire. What a value may be is the store's to say, for both doors."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from protos.nightshift.v1 import webhooks_pb2
from services.gateway import checks
from services.gateway.rest.translate import optional
from services.kit.wire.errors import InvalidRequestError, NotFoundError
from services.kit.wire.ids import is_public_id

_STATE_PREFIX: Final = "WEBHOOK_DELIVERY_STATE_"
_STATES: Final = {
    name.removeprefix(_STATE_PREFIX).lower(): number
    for name, number in webhooks_pb2.WebhookDeliveryState.items()
    if number
}


def endpoint_object(endpoint: webhooks_pb2.WebhookEndpoint) -> dict[str, Any]:
    """Return OpenAI's webhook endpoint."""
    return {
        "id": endpoint.id,
        "object": "webhook_endpoint",
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": list(endpoint.event_types),
        "created_at": endpoint.created_at,
        "updated_at": endpoint.updated_at,
        "signing_secret_hint": endpoint.signing_secret_hint,
    }


def delivery_object(delivery: webhooks_pb2.WebhookDelivery) -> dict[str, Any]:
    """Return a delivery, an object of ours."""
    state = webhooks_pb2.WebhookDeliveryState.Name(delivery.state)
    return {
        "id": delivery.id,
        "object": "webhook_delivery",
        "webhook_endpoint_id": delivery.webhook_endpoint_id,
        "event_id": delivery.event_id,
        "event_type": delivery.event_type,
        "batch_id": delivery.batch_id,
        "state": state.removeprefix(_STATE_PREFIX).lower(),
        "attempts": delivery.attempts,
        "created_at": delivery.created_at,
        "next_attempt_at": optional(delivery, "next_attempt_at"),
        "last_status_code": optional(delivery, "last_status_code"),
        "last_error": optional(delivery, "last_error"),
        "ended_at": optional(delivery, "ended_at"),
    }


def endpoint_id_of(text: str) -> str:
    """Return `text` where it can be an id.

    Raises:
        NotFoundError: it cannot, so that no such endpoint exists.
    """
    if not is_public_id(text):
        raise NotFoundError(f"No webhook endpoint found with id '{text[:100]}'.")
    return text


def delivery_id_of(text: str) -> str:
    """Return `text` where it can be the id of a delivery or an event.

    Raises:
        NotFoundError: it cannot, so that there is none.
    """
    if not is_public_id(text):
        raise NotFoundError(f"No webhook delivery or event found with id '{text[:100]}'.")
    return text


def parse_create(body: bytes) -> webhooks_pb2.CreateWebhookEndpointRequest:
    """Return the request that a JSON body makes.

    Raises:
        InvalidRequestError: not JSON, a field is unknown, missing or of the wrong type.
    """
    required = ("name", "url", "event_types")
    fields = _fields(body, known=required, required=required)
    return webhooks_pb2.CreateWebhookEndpointRequest(
        name=checks.text_of("name", fields["name"]),
        url=checks.text_of("url", fields["url"]),
        event_types=_texts("event_types", fields["event_types"]),
    )


def parse_update(endpoint_id: str, body: bytes) -> webhooks_pb2.UpdateWebhookEndpointRequest:
    """Return the request that a JSON body makes; what is absent or null is left as it is.

    Raises:
        InvalidRequestError: not JSON, a field is unknown or of the wrong type.
    """
    fields = _fields(body, known=("name", "url", "event_types"))
    request = webhooks_pb2.UpdateWebhookEndpointRequest(webhook_endpoint_id=endpoint_id)
    if fields.get("name") is not None:
        request.name = checks.text_of("name", fields["name"])
    if fields.get("url") is not None:
        request.url = checks.text_of("url", fields["url"])
    if fields.get("event_types") is not None:
        types = _texts("event_types", fields["event_types"])
        if not types:
            raise InvalidRequestError(
                "Invalid 'event_types': expected at least one. Delete the endpoint to be told of "
                "nothing.",
                code="invalid_value",
                param="event_types",
            )
        request.event_types.extend(types)
    return request


def parse_rotate(endpoint_id: str, body: bytes) -> webhooks_pb2.RotateWebhookSecretRequest:
    """Return the request that a JSON body makes; it may be empty.

    Raises:
        InvalidRequestError: not JSON, a field is unknown or of the wrong type.
    """
    name = "keep_old_secret_active_for_24_hours"
    keep = _fields(body or b"{}", known=(name,)).get(name)
    if keep is not None and not isinstance(keep, bool):
        checks.wrong_type(name, "a boolean", checks.kind_of(keep))
    return webhooks_pb2.RotateWebhookSecretRequest(
        webhook_endpoint_id=endpoint_id, keep_old_secret_active_for_24_hours=bool(keep)
    )


def parse_test(endpoint_id: str, body: bytes) -> webhooks_pb2.TestWebhookEndpointRequest:
    """Return the request that a JSON body makes.

    Raises:
        InvalidRequestError: not JSON, a field is unknown, missing or of the wrong type.
    """
    fields = _fields(body, known=("event_type",), required=("event_type",))
    return webhooks_pb2.TestWebhookEndpointRequest(
        webhook_endpoint_id=endpoint_id,
        event_type=checks.text_of("event_type", fields["event_type"]),
    )


def state_of(query: Mapping[str, str]) -> webhooks_pb2.WebhookDeliveryState.ValueType:
    """Return the state that a list of deliveries is asked for; unspecified means any.

    Raises:
        InvalidRequestError: there is no such state.
    """
    text = query.get("state", "")
    if not text:
        return webhooks_pb2.WEBHOOK_DELIVERY_STATE_UNSPECIFIED
    checks.check_value("state", text, tuple(_STATES))
    return _STATES[text]


def _fields(
    body: bytes, *, known: Collection[str], required: Collection[str] = ()
) -> dict[str, Any]:
    fields = checks.parse_object(body)
    for name in fields:
        if name not in known:
            raise InvalidRequestError(
                f"Unknown parameter: '{name[:100]}'.", code="unknown_parameter", param=name[:100]
            )
    for name in required:
        if name not in fields:
            checks.missing(name)
    return fields


def _texts(name: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        checks.wrong_type(name, "an array of strings", checks.kind_of(value))
    return [checks.text_of(f"{name}[{position}]", item) for position, item in enumerate(value)]
