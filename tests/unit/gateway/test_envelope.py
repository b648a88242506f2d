"""The one error table as HTTP says it."""

import orjson
import pytest

from services.gateway.rest.envelope import error_headers, error_response, list_object
from services.kit.wire.errors import (
    ConflictError,
    InternalError,
    InvalidRequestError,
    RateLimitedError,
    UnavailableError,
)


def test_all_four_keys_are_always_there() -> None:
    response = error_response(InvalidRequestError("m"))
    assert orjson.loads(response.body) == {
        "error": {"message": "m", "type": "invalid_request_error", "param": None, "code": None}
    }
    assert (response.status_code, response.media_type) == (400, "application/json")


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (InvalidRequestError("m"), {}),
        (ConflictError("m"), {"x-should-retry": "false"}),
        (InternalError("m"), {}),
        (UnavailableError("m"), {"retry-after": "1", "retry-after-ms": "1000"}),
        (
            RateLimitedError("m", retry_after_seconds=0.2),
            {"retry-after": "1", "retry-after-ms": "200"},
        ),
        (
            UnavailableError("m", retry_after_seconds=61),
            {"retry-after": "61", "retry-after-ms": "61000"},
        ),
    ],
)
def test_clients_are_told_whether_to_repeat(
    error: InvalidRequestError, headers: dict[str, str]
) -> None:
    assert error_headers(error) == headers


def test_empty_list_has_null_ids() -> None:
    assert list_object([], has_more=False) == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
