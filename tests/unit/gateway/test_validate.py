"""Checks of what clients send, against every JSON value there is."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.nightshift.v1 import batches_pb2
from services.gateway import checks
from services.kit.wire.endpoints import ENDPOINTS
from services.kit.wire.errors import InvalidRequestError, NightshiftError, NotFoundError

T = TypeVar("T")

WINDOWS = {"24h": 86_400}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=600)
keys = st.sampled_from(
    ["input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after", "x"]
)
likely: dict[str, st.SearchStrategy[Any]] = {
    "input_file_id": texts,
    "endpoint": st.sampled_from([*ENDPOINTS, "/v1/x"]),
    "completion_window": st.sampled_from(["24h", "1h"]),
    "metadata": st.none() | st.dictionaries(texts, texts, max_size=20),
    "output_expires_after": st.none()
    | st.fixed_dictionaries(
        {"anchor": st.just("created_at"), "seconds": st.integers(0, 3_000_000)}
    ),
}


def attempt(check: Callable[[], T]) -> T | NightshiftError:
    """Return what `check` returns, or the error that it refuses with; any other is a crash."""
    try:
        return check()
    except NightshiftError as error:
        return error


@given(st.dictionaries(keys, values) | st.fixed_dictionaries(likely))
def test_any_object_is_taken_or_refused(body: dict[str, Any]) -> None:
    def parse() -> batches_pb2.CreateBatchRequest:
        request = checks.parse_create_batch(orjson.dumps(body))
        checks.check_create_batch(request, WINDOWS)
        return request

    request = attempt(parse)
    if isinstance(request, NightshiftError):
        assert request.message
        assert request.code
        assert request.param is not None
        return
    assert 1 <= len(request.input_file_id) <= 512
    assert request.endpoint in ENDPOINTS
    assert request.completion_window_seconds == 86_400
    assert request.has_metadata == (body.get("metadata") is not None)
    assert dict(request.metadata) == (body.get("metadata") or {})
    assert len(request.metadata) <= 16
    if request.HasField("output_expires_after"):
        assert 3_600 <= request.output_expires_after.seconds <= 2_592_000


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    parsed = attempt(lambda: checks.parse_object(body))
    if isinstance(parsed, NightshiftError):
        assert parsed.message.startswith("We could not parse the JSON body of your request.")
    else:
        assert parsed == orjson.loads(body)


@given(st.text(max_size=200))
def test_any_id_is_taken_or_unknown(text: str) -> None:
    for check in (checks.file_id_of, checks.batch_id_of):
        found = attempt(functools.partial(check, text))
        if isinstance(found, NightshiftError):
            assert isinstance(found, NotFoundError)
            assert text in found.message
        else:
            assert found == text
            assert text.isascii()


@given(st.text(max_size=30) | st.integers().map(str))
def test_any_limit_is_taken_or_refused(text: str) -> None:
    limit = attempt(lambda: checks.limit_of({"limit": text}, default=20, maximum=100))
    if isinstance(limit, NightshiftError):
        assert limit.param == "limit"
        return
    assert limit == (int(text) if text else 20)
    assert 1 <= limit <= 100


@pytest.mark.parametrize(
    ("number", "listed"), [(1, "'a'"), (2, "'a' and 'b'"), (3, "'a', 'b' and 'c'")]
)
def test_supported_values_are_listed(number: int, listed: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checks.check_value("p", "x" * 1000, ("a", "b", "c")[:number])
    assert caught.value.message.endswith(f"Supported values are: {listed}.")
    assert len(caught.value.message) < 200
