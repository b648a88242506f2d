"""What every answer is wrapped in: OpenAI's error and list objects."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from starlette.responses import Response

from services.kit.wire.errors import NightshiftError

_RETRIED_STATUSES: Final = frozenset({408, 409, 429})
"""Statuses below 500 that the official clients repeat unless told otherwise."""

_LONG_WAIT_SECONDS: Final = 60.0
"""A limit that lasts longer is its user's to judge: clients would sleep through it, or give up."""


class JsonResponse(Response):
    """A JSON answer, written by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return `content` as JSON bytes."""
        return orjson.dumps(content)


def error_object(error: NightshiftError) -> dict[str, Any]:
    """Return an error's body; all four keys are always there."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_headers(error: NightshiftError) -> dict[str, str]:
    """Return the headers that tell a client whether and when to try again."""
    headers: dict[str, str] = {}
    status = error.http_status
    wait = error.retry_after_seconds
    if wait is None and status == 503:
        wait = 1.0
    harmful = not error.retryable and (status in _RETRIED_STATUSES or status >= 500)
    if harmful or (status == 429 and wait is not None and wait > _LONG_WAIT_SECONDS):
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if wait is not None:
        headers["retry-after"] = str(max(1, math.ceil(wait)))
        headers["retry-after-ms"] = str(math.ceil(wait * 1000))
    return headers


def error_response(
    error: NightshiftError, *, headers: Mapping[str, str] | None = None
) -> JsonResponse:
    """Return the answer for `error`, with `headers` on top of its own."""
    return JsonResponse(
        error_object(error),
        status_code=error.http_status,
        headers={**error_headers(error), **(headers or {})},
    )


def list_object(items: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return one page of a list; `items` are objects with an `id`."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
