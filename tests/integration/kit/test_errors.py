"""What a servicer raises is what its caller gets, over a real connection and in every shape."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from structlog.testing import CapturingLogger

from services.kit.calls import interceptors, rpc
from services.kit.calls.interceptors import ErrorsInterceptor, TelemetryInterceptor
from services.kit.wire import errors
from services.kit.wire.errors import NightshiftError, from_rpc_error
from tests.integration.kit import echo

pytestmark = pytest.mark.integration

Call = Callable[..., Awaitable[None]]
SECRET = "hunter2"

shapes = pytest.mark.parametrize("call", echo.SHAPES, ids=lambda one: str(one.__name__))


@pytest.fixture
def servicer() -> echo.Raising:
    return echo.Raising()


@pytest.fixture
async def channel(servicer: echo.Raising) -> AsyncIterator[grpc.aio.Channel]:
    server = await echo.start(servicer, [TelemetryInterceptor(), ErrorsInterceptor()])
    channel = rpc.open_channel(f"127.0.0.1:{server.port}")
    yield channel
    await channel.close()
    await server.drain(0)


async def failure_of(call: Call, channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    """Return how a call fails."""
    with pytest.raises(rpc.CallFault) as raised:
        await call(channel)
    return raised.value


def in_words(error: Any) -> dict[str, Any]:
    """Return all that a caller is told."""
    names = ("message", "code", "param", "retry_after_seconds", "http_status", "type", "retryable")
    return {name: getattr(error, name) for name in names}


@pytest.mark.parametrize(
    ("call", "answers_first"),
    [
        *((call, False) for call in echo.SHAPES),
        (echo.answers_stream, True),
        (echo.both_stream, True),
    ],
    ids=lambda one: getattr(one, "__name__", "after an answer" if one else "at once"),
)
async def test_every_error_of_the_table_arrives_as_itself(
    servicer: echo.Raising, channel: grpc.aio.Channel, call: Call, answers_first: bool
) -> None:
    servicer.answers_first = answers_first
    kinds = [kind for kind in errors.all_error_classes() if kind is not NightshiftError]
    assert len(kinds) >= 11
    for kind in kinds:
        servicer.fault = sent = kind(
            "Line 4: é “wrong”\nchange it",
            code="some_code",
            param="body.x",
            retry_after_seconds=2.5,
        )
        got = from_rpc_error(await failure_of(call, channel))
        assert type(got) is kind
        assert in_words(got) == in_words(sent)


@shapes
async def test_absent_fields_stay_absent(
    servicer: echo.Raising, channel: grpc.aio.Channel, call: Call
) -> None:
    servicer.fault = errors.ConflictError("no")
    got = from_rpc_error(await failure_of(call, channel))
    assert (got.code, got.param, got.retry_after_seconds) == (None, None, None)


@shapes
async def test_an_unknown_fault_is_told_by_an_id_that_the_log_has_too(
    servicer: echo.Raising,
    channel: grpc.aio.Channel,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged = CapturingLogger()
    monkeypatch.setattr(interceptors, "_log", logged)
    servicer.fault = KeyError(SECRET)
    failure = await failure_of(call, channel)

    assert failure.code() is grpc.StatusCode.INTERNAL
    told = f"{failure.details()} {failure.trailing_metadata()} {failure.debug_error_string()}"
    assert SECRET not in told
    assert "KeyError" not in told
    got = from_rpc_error(failure)
    assert type(got) is errors.InternalError
    (entry,) = logged.calls
    assert entry.kwargs["error_id"] in got.message
    assert entry.kwargs["exc_info"] is servicer.fault


@shapes
async def test_a_call_that_succeeds_is_left_alone(channel: grpc.aio.Channel, call: Call) -> None:
    await call(channel)


async def test_metrics_see_the_code_that_the_caller_sees(
    servicer: echo.Raising, channel: grpc.aio.Channel
) -> None:
    def count(code: str) -> float:
        labels = {"method": "/nightshift.v1.Batches/CreateBatch", "code": code}
        return rpc_calls(labels)

    before = count("NOT_FOUND"), count("OK")
    servicer.fault = errors.NotFoundError("gone")
    await failure_of(echo.unary, channel)
    servicer.fault = None
    await echo.unary(channel)
    assert (count("NOT_FOUND"), count("OK")) == (before[0] + 1, before[1] + 1)


def rpc_calls(labels: dict[str, str]) -> float:
    """Return how many calls this process counted so far."""
    for family in interceptors._CALLS.collect():
        for sample in family.samples:
            if sample.name.endswith("_total") and sample.labels == labels:
                return float(sample.value)
    return 0.0


async def test_a_service_that_is_away_is_unavailable_and_worth_another_try() -> None:
    channel = rpc.open_channel("127.0.0.1:9")
    try:
        got = from_rpc_error(await failure_of(echo.answers_stream, channel))
    finally:
        await channel.close()
    assert type(got) is errors.UnavailableError
    assert got.retry_after_seconds == 1.0
    assert "127.0.0.1" not in got.message
