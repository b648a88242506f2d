"""The seam between the executor and whatever turns request bodies into response bodies.

Exceptions an engine's answer may raise:

    EngineError
    ├── EngineStartError    it could not be started; the message says why
    ├── EngineDead          its process died; every call in flight raises this
    └── RequestAborted      we aborted this request; never a result

Everything else an engine has to say about a line, refusals included, is an `EngineResponse`.
"""

from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import orjson

STALL_LIMIT_SECONDS = 60.0
"""An engine that has work and makes no step for this long is dead, whatever it says itself."""


class EngineError(Exception):
    """Root of what engines raise."""


class EngineStartError(EngineError):
    """The engine could not be started."""


class EngineDead(EngineError):
    """The engine's process died. All in flight is lost; only a new `start` helps."""


class RequestAborted(EngineError):
    """The request was aborted by us. Whatever the engine returned for it was discarded."""


class EngineRequest(msgspec.Struct, frozen=True, gc=False):
    """One line's request, for one attempt."""

    endpoint: str
    """The path as in the input line: `/v1/chat/completions`."""
    model: str
    """The name the engine serves the line under (an alias already resolved)."""
    body: bytes
    """A JSON object: the endpoint's parameters, as the user wrote them."""
    request_id: str
    """32 hex digits, unique per attempt; the handle for `abort`."""
    attempt: int
    """Number of the line's attempt, from 1."""
    batch_id: str = ""
    """Whose line it is, for what an engine notes; it steers nothing."""
    project_id: str = ""
    """Whose batch that is: what an engine keeps of a line serves no other project's."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one response; all zero where the engine reported none."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


NO_USAGE = Usage()


class EngineResponse(msgspec.Struct, frozen=True, gc=False):
    """What the online endpoint would have answered."""

    status: int
    """HTTP status."""
    body: bytes
    """One JSON object: strict JSON (no NaN), UTF-8, no raw line breaks."""
    usage: Usage = NO_USAGE
    retry_after_seconds: float | None = None
    """How long the engine asked to be left alone, with 429 and 503."""


Answer = EngineResponse | Awaitable[EngineResponse]


class Engine(Protocol):
    """What every engine promises; `tests/contract/test_engines.py` says it in code.

    All methods are called from one event loop. Awaitables given out by `submit` and
    `submit_many` may be left unawaited (nothing is logged), and cancelling one aborts it.
    """

    @property
    def name(self) -> str:
        """Kind of engine: `vllm`, `simulated`."""
        ...

    @property
    def seats(self) -> int:
        """Requests the engine can run at once; more may be submitted, they queue inside."""
        ...

    @property
    def revision(self) -> str:
        """16 hex digits that change with the engine's configuration or version."""
        ...

    @property
    def endpoints(self) -> frozenset[str]:
        """Paths it serves; known once `start` returned."""
        ...

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together; None where unknown. Known after `start`."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet answered, queued ones included."""
        ...

    @property
    def last_step_at(self) -> float:
        """Monotonic seconds of the engine's last sign of progress."""
        ...

    @property
    def stall_limit_seconds(self) -> float:
        """A step may take so long before it counts as a hang, unless a setting says otherwise.

        Known after `start`.
        """
        ...

    async def start(self) -> None:
        """Make it ready. Works again after `EngineDead` and after `close`.

        Raises `EngineStartError`.
        """
        ...

    def submit(self, request: EngineRequest) -> Awaitable[EngineResponse]:
        """Answer one request. Awaiting raises `EngineDead` or `RequestAborted`."""
        ...

    def submit_many(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        """Answer many, in the order given; a plain value where the engine answers at once.

        Never raises for the engine's death: the awaitables do.
        """
        ...

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Abort these; unknown and finished ones are ignored.

        Their awaitables raise `RequestAborted` and their seats are free when this returns.
        """
        ...

    def stalled_seconds(self) -> float:
        """Seconds without a step while work waits; 0 when idle or stepping."""
        ...

    def check_health(self) -> None:
        """Raise `EngineDead` if it is dead or was not started."""
        ...

    async def close(self) -> None:
        """Abort what is in flight and leave no process behind. Repeatable."""
        ...


def error_body(
    message: str, *, type_: str, param: str | None = None, code: str | None = None
) -> bytes:
    """OpenAI's error envelope with all four keys. Lone surrogates in texts are replaced."""
    error = {"message": message, "type": type_, "param": param, "code": code}
    clean = {
        key: value.encode("utf-8", "replace").decode() if value is not None else None
        for key, value in error.items()
    }
    return orjson.dumps({"error": clean})


def refusal(
    message: str, *, param: str | None = None, code: str | None = None, status: int = 400
) -> EngineResponse:
    """A response for a request that is at fault itself."""
    kind = "invalid_request_error"
    return EngineResponse(status, error_body(message, type_=kind, param=param, code=code))


def too_deep() -> EngineResponse:
    """A response for a request that is nested deeper than can be handled, or repeated."""
    return refusal("The body is nested too deeply.")


def answered(content: dict[str, Any], usage: Usage) -> EngineResponse:
    """A response with this body, as strict JSON: NaN and infinities (log-probabilities) are null.

    Lone surrogates, which a model may write as escapes into a call's arguments, are replaced. What
    is nested too deeply to be written, such as tools that an answer repeats, is a refusal.
    """
    try:
        return EngineResponse(200, _json(content), usage)
    except TypeError:
        pass
    try:
        return EngineResponse(200, _json(_without_surrogates(content)), usage)
    except (TypeError, RecursionError):
        return too_deep()


def _json(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        pairs = value.items()
        return {_without_surrogates(key): _without_surrogates(item) for key, item in pairs}
    return value


def usage_of(body: dict[str, Any]) -> Usage:
    """Token counts of an OpenAI response body (of any endpoint).

    Missing or odd values count 0: usage is bookkeeping and must never fail a line.
    """
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return NO_USAGE

    def count(*names: str) -> int:
        for name in names:
            value = usage.get(name)
            if isinstance(value, int) and value > 0:
                return value
        return 0

    def detail(part: str, *names: str) -> int:
        for name in names:
            details = usage.get(name)
            value = details.get(part) if isinstance(details, dict) else None
            if isinstance(value, int) and value > 0:
                return value
        return 0

    return Usage(
        input_tokens=count("prompt_tokens", "input_tokens"),
        cached_tokens=detail("cached_tokens", "prompt_tokens_details", "input_tokens_details"),
        output_tokens=count("completion_tokens", "output_tokens"),
        reasoning_tokens=detail(
            "reasoning_tokens", "completion_tokens_details", "output_tokens_details"
        ),
    )
