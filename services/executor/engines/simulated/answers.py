"""What the simulated engine answers: pure functions of the request.

Two ways to the same answer: a typed decoder for the common chat line (a few microseconds), and
a strict one for all else. The fast one gives up (None) rather than judge.
"""

import base64
import struct
from hashlib import sha256
from typing import Annotated, Any

import msgspec
import orjson

from services.executor.engines.base import (
    EngineRequest,
    EngineResponse,
    Usage,
    answered,
    error_body,
)
from services.executor.engines.bodies.bounds import MOST_ELEMENTS, BodyRefused, bounded_body
from services.executor.engines.bodies.guard import guarded_body
from services.executor.engines.simulated.bodies import (
    rerank_body,
    response_body,
    score_body,
    vector,
)
from services.executor.engines.simulated.texts import (
    MAX_WORDS,
    is_number,
    is_whole,
    sides_of,
    texts_of,
)
from services.kit.wire.endpoints import (
    CHAT_COMPLETIONS,
    EMBEDDINGS,
    ENDPOINTS,
    RERANK,
    RESPONSES,
    SCORE,
)
from services.kit.wire.values import MOST_VALUES

MAX_OUTPUT_BYTES = 64 * 1024 * 1024
MAX_DELAY_MS = 86_400_000
DEFAULT_DIMENSIONS = 8
MAX_DIMENSIONS = 4_096

_TokenLimit = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORDS)] | None


class Faults(msgspec.Struct, frozen=True, gc=False):
    """`x_simulate` of a body, checked."""

    delay_ms: float = 0.0
    status: int | None = None
    times: int | None = None
    """The status is answered for attempts up to this one; None is always."""
    crash: int = 0
    """The engine dies for attempts up to this one."""
    hang: bool = False
    hang_engine: bool = False
    output_bytes: int | None = None

    def takes_time(self, attempt: int) -> bool:
        """Whether the line must hold a seat rather than be answered at once."""
        return bool(self.delay_ms or self.hang or self.hang_engine or attempt <= self.crash)


class _FastMessage(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    content: str
    role: str = ""
    name: str | None = None


class _FastChat(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """All that it does not know is for the strict way: it may be what is refused."""

    model: str
    messages: Annotated[list[_FastMessage], msgspec.Meta(min_length=1, max_length=MOST_ELEMENTS)]
    max_tokens: _TokenLimit = None
    max_completion_tokens: _TokenLimit = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] | None = None
    x_simulate: None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | None = None
    user: str | None = None


_decode_chat = msgspec.json.Decoder(_FastChat).decode

_CHAT_TEMPLATE = (
    b'{"id":"chatcmpl-%b","object":"chat.completion","created":%d,"model":%b,"choices":[{"index":'
    b'0,"message":{"role":"assistant","content":"sim-%b","refusal":null},"logprobs":null,'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":%d,"completion_tokens":1,"total_tokens":'
    b'%d,"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":'
    b'{"reasoning_tokens":0}},"system_fingerprint":"simulated"}'
)


def fast_chat(request: EngineRequest, created: int) -> EngineResponse | None:
    """The answer to a plain chat line, or None where the strict way must look."""
    body = request.body
    escapes = b"\\" in body
    # Decoders skip unknown fields unread, so an escaped surrogate may hide there.
    if (
        request.endpoint != CHAT_COMPLETIONS
        or len(body) > MOST_VALUES
        or (escapes and (b"\\ud" in body or b"\\uD" in body))
    ):
        return None
    try:
        chat = _decode_chat(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    words = 0
    text = ""
    for message in chat.messages:
        text = message.content
        # Without escapes an ASCII JSON string holds no white space but the blank, and counting
        # those is ten times cheaper than splitting.
        if not escapes and text and "  " not in text and text.isascii():
            words += text.count(" ") + 1 - (text[0] == " ") - (text[-1] == " ")
        else:
            words += len(text.split())
    if words > MAX_WORDS:
        return None
    answer = _CHAT_TEMPLATE % (
        request.request_id.encode(),
        created,
        orjson.dumps(chat.model),
        sha256(text.encode()).hexdigest()[:16].encode(),
        words,
        words + 1,
    )
    return EngineResponse(200, answer, Usage(words, 0, 1, 0))


def read_body(request: EngineRequest) -> tuple[dict[str, Any], Faults]:
    """The body and its faults, checked as for any engine. Raises `BodyRefused`."""
    if request.endpoint not in ENDPOINTS:
        raise BodyRefused(f"This engine does not serve {request.endpoint}.")
    body = bounded_body(request)
    simulated = body.get("x_simulate")
    model = body.get("model")
    body = guarded_body(request, body)
    body["model"] = model
    _check_sampling(body)
    texts_of(request.endpoint, body)
    return body, _read_faults(simulated)


def answer(request: EngineRequest, created: int) -> EngineResponse:
    """The full answer by the strict way, faults of status and size included.

    `created` is in Unix seconds.
    """
    try:
        body, faults = read_body(request)
        if faults.status is not None and (faults.times is None or request.attempt <= faults.times):
            return _simulated_status(faults.status)
        if request.endpoint == EMBEDDINGS:
            return _embeddings(body)
        if request.endpoint == RESPONSES:
            return _response(request, body, faults, created)
        if request.endpoint in (SCORE, RERANK):
            return _scored(request, body, created)
        return _generated(request, body, faults, created)
    except BodyRefused as refused:
        return refused.response


def _check_sampling(body: dict[str, Any]) -> None:
    if not isinstance(body.get("model"), str):
        raise BodyRefused("Missing required parameter: 'model'.", "model")
    for name, limit in (
        ("max_tokens", MAX_WORDS),
        ("max_completion_tokens", MAX_WORDS),
        ("max_output_tokens", MAX_WORDS),
    ):
        value = body.get(name)
        if value is not None and not (is_whole(value) and 1 <= value <= limit):
            raise BodyRefused(f"Invalid '{name}': expected a whole number from 1 to {limit}.", name)
    value = body.get("temperature")
    if value is not None and not (is_number(value) and 0 <= value <= 2):
        raise BodyRefused("Invalid 'temperature': expected a number from 0 to 2.", "temperature")


def _read_faults(value: object) -> Faults:
    if value is None:
        return Faults()
    if not isinstance(value, dict):
        raise BodyRefused("Invalid 'x_simulate': expected an object.", "x_simulate")
    known = {"delay_ms", "status", "times", "crash", "hang", "output_bytes"}
    unknown = sorted(value.keys() - known)
    if unknown:
        raise BodyRefused(f"Unknown parameter: 'x_simulate.{unknown[0]}'.", "x_simulate")

    def checked(name: str, low: int, high: int) -> Any:
        number = value.get(name)
        whole = is_number(number) if name == "delay_ms" else is_whole(number)
        if number is not None and not (whole and low <= number <= high):
            raise BodyRefused(
                f"Invalid 'x_simulate.{name}': expected a number from {low} to {high}.",
                "x_simulate",
            )
        return number

    hang = value.get("hang")
    if hang not in (None, True, False, "engine"):
        raise BodyRefused("Invalid 'x_simulate.hang': expected true or \"engine\".", "x_simulate")
    always = 2**31
    crash = value.get("crash")
    return Faults(
        delay_ms=checked("delay_ms", 0, MAX_DELAY_MS) or 0.0,
        status=checked("status", 400, 599),
        times=checked("times", 0, always),
        crash=always * crash if isinstance(crash, bool) else checked("crash", 0, always) or 0,
        hang=hang is True,
        hang_engine=hang == "engine",
        output_bytes=checked("output_bytes", 0, MAX_OUTPUT_BYTES),
    )


def _simulated_status(status: int) -> EngineResponse:
    if status == 429:
        kind, code = "requests", "rate_limit_exceeded"
    elif status >= 500:
        kind, code = "server_error", None
    else:
        kind, code = "invalid_request_error", None
    message = f"Simulated answer with status {status}."
    return EngineResponse(status, error_body(message, type_=kind, code=code))


def _content(text: str, output_bytes: int | None) -> str:
    content = "sim-" + sha256(text.encode()).hexdigest()[:16]
    return content if output_bytes is None else content[:output_bytes].ljust(output_bytes, "x")


def _generated(
    request: EngineRequest, body: dict[str, Any], faults: Faults, created: int
) -> EngineResponse:
    chat = request.endpoint == CHAT_COMPLETIONS
    texts = texts_of(request.endpoint, body)
    words = sum(len(text.split()) for text in texts)
    each = body.get("n") or 1
    answered = texts[-1:] if chat else texts
    if (faults.output_bytes or 0) * each * len(answered) > MAX_OUTPUT_BYTES:
        raise BodyRefused(
            "Invalid 'x_simulate.output_bytes': too much in all choices.", "x_simulate"
        )
    contents = [_content(text, faults.output_bytes) for text in answered for _ in range(each)]
    choices: list[dict[str, Any]] = []
    for index, content in enumerate(contents):
        choice: dict[str, Any] = {"index": index}
        if chat:
            choice["message"] = {"role": "assistant", "content": content, "refusal": None}
        else:
            choice["text"] = content
        choices.append(choice | {"logprobs": None, "finish_reason": "stop"})
    output_words = sum(len(content.split()) for content in contents)
    answer_body = {
        "id": ("chatcmpl-" if chat else "cmpl-") + request.request_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": body["model"],
        "choices": choices,
        "usage": {
            "prompt_tokens": words,
            "completion_tokens": output_words,
            "total_tokens": words + output_words,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "system_fingerprint": "simulated",
    }
    return EngineResponse(200, orjson.dumps(answer_body), Usage(words, 0, output_words, 0))


def _response(
    request: EngineRequest, body: dict[str, Any], faults: Faults, created: int
) -> EngineResponse:
    texts = texts_of(RESPONSES, body)
    words = sum(len(text.split()) for text in texts)
    content = _content(texts[-1], faults.output_bytes)
    answer_body = response_body(body, request.request_id, content, words, created)
    return answered(answer_body, Usage(words, 0, len(content.split()), 0))


def _scored(request: EngineRequest, body: dict[str, Any], created: int) -> EngineResponse:
    one, other = sides_of(request.endpoint, body)
    words = sum(len(text.split()) for text in one + other)
    if request.endpoint == SCORE:
        answer_body = score_body(body, request.request_id, one, other, created)
    else:
        top_n = body.get("top_n")
        if top_n is not None and not (is_whole(top_n) and top_n >= 0):
            raise BodyRefused("Invalid 'top_n': expected a whole number from 0.", "top_n")
        answer_body = rerank_body(body, request.request_id, one[0], other)
    answer_body["usage"] = {"prompt_tokens": words, "total_tokens": words}
    answer_body["system_fingerprint"] = "simulated"
    return EngineResponse(200, orjson.dumps(answer_body), Usage(words, 0, 0, 0))


def _embeddings(body: dict[str, Any]) -> EngineResponse:
    texts = texts_of(EMBEDDINGS, body)
    dimensions = body.get("dimensions")
    dimensions = DEFAULT_DIMENSIONS if dimensions is None else dimensions
    if not (is_whole(dimensions) and 1 <= dimensions <= MAX_DIMENSIONS):
        raise BodyRefused(f"Invalid 'dimensions': expected 1 to {MAX_DIMENSIONS}.", "dimensions")
    encoding = body.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise BodyRefused("Invalid 'encoding_format': expected float or base64.", "encoding_format")
    if len(texts) * dimensions * 20 > MAX_OUTPUT_BYTES:
        raise BodyRefused("Too many inputs of too many dimensions.", "input")
    data = []
    for index, text in enumerate(texts):
        numbers: Any = vector(text, dimensions)
        if encoding == "base64":
            numbers = base64.b64encode(struct.pack(f"<{dimensions}f", *numbers)).decode()
        data.append({"object": "embedding", "index": index, "embedding": numbers})
    words = sum(len(text.split()) for text in texts)
    answer_body = {
        "object": "list",
        "data": data,
        "model": body["model"],
        "usage": {"prompt_tokens": words, "total_tokens": words},
        "system_fingerprint": "simulated",
    }
    return EngineResponse(200, orjson.dumps(answer_body), Usage(words, 0, 0, 0))
