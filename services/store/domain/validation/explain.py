"""What is wrong with one line, in the words of the public contract, and what to change.

Codes and params are those of the contract's table of input faults. Messages begin with the
sentence that clients know and go on with what helps; they quote the user's own line only, and of
that at most 100 characters.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from services.kit.wire.endpoints import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    EMBEDDINGS,
    RERANK,
    RESPONSES,
    SCORE,
)
from services.kit.wire.values import MOST_NUMBERS, MOST_VALUES
from services.store.domain.index.body_fields import missing_fields
from services.store.domain.index.line_index import MAX_CUSTOM_ID_CHARS, MAX_NAME_CHARS
from services.store.domain.validation.unreadable import unreadable

_TITLE: Final = {
    CHAT_COMPLETIONS: "Chat Completions",
    COMPLETIONS: "Completions",
    EMBEDDINGS: "Embeddings",
    RESPONSES: "Responses",
    SCORE: "Score",
    RERANK: "Rerank",
}
_ELSEWHERE: Final = {"body": ("params",), "custom_id": ("id",), "url": ("endpoint",)}
"""What other batch services call a line's fields, as `_plain` gives it."""
_QUOTED_CHARS: Final = 100
_LISTED_MODELS: Final = 10


@dataclass(frozen=True, slots=True)
class BatchError:
    """One entry of a batch's `errors.data`. `line` is the physical line from 1, None for the
    whole file."""

    code: str
    message: str
    param: str | None
    line: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a line has to fit: the batch's endpoint, the models served (with the endpoints of each),
    and the model of the file's first usable line (None where there is none, or any will do)."""

    endpoint: str
    served_models: Mapping[str, frozenset[str]]
    file_model: str | None


# --- faults of the whole file --------------------------------------------------------------------


def empty_file() -> BatchError:
    return BatchError(
        "empty_file",
        "The input file holds no request. Write at least one, as one JSON object on one line.",
        None,
        None,
    )


def too_many_lines(lines: int, most: int) -> BatchError:
    return BatchError(
        "too_many_tasks",
        f"The input file holds {lines} requests; a batch may have at most {most}. "
        "Split the file into several batches.",
        None,
        None,
    )


def more_lines(count: int) -> BatchError:
    what = "1 more line has errors" if count == 1 else f"{count} more lines have errors"
    return BatchError(
        "more_errors", f"{what} not listed here. Correct those listed and try again.", None, None
    )


# --- faults of one line --------------------------------------------------------------------------


def line_too_long(line: int, length: int, most: int) -> BatchError:
    """A line above `max_line_bytes`, which nobody read."""
    message = f"This line has {length} bytes; at most {most} are allowed. Shorten the request."
    return BatchError("line_too_long", message, None, line)


def too_many_values(line: int) -> BatchError:
    """A line with more values than are parsed, which nobody read either."""
    message = (
        f"This line has more than {MOST_VALUES} values (entries of arrays and objects), or more "
        f"than {MOST_NUMBERS} numbers in arrays. Split the request."
    )
    return BatchError("too_many_values", message, None, line)


def duplicate(line: int, custom_id: str, first_line: int) -> BatchError:
    """A custom_id that stood before, on `first_line`."""
    message = (
        f"The custom_id {_quote(custom_id)} is a duplicate of that of the request on line "
        f"{first_line}. Give each request of the file a custom_id of its own."
    )
    return BatchError("duplicate_custom_id", message, "custom_id", line)


def custom_id_of(raw: bytes) -> str:
    """The custom_id of a line whose index says that it has one. ValueError if it has none."""
    custom_id = orjson.loads(raw)["custom_id"]
    if type(custom_id) is not str:
        raise ValueError("a line without a custom_id")
    return custom_id


def no_object(raw: bytes) -> tuple[str, str] | None:
    """Code and message for a line that is no JSON object; None for one that is."""
    try:
        request = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return "invalid_json_line", unreadable(raw, error)
    if type(request) is dict:
        return None
    message = (
        f"Each line must be one JSON object, but this one is {_kind(request)}. "
        "Write the request as {…} on one line."
    )
    return "invalid_request", message


def explain_line(raw: bytes, *, line: int, expectation: Expectation) -> list[BatchError]:
    """All faults of one request, from its bytes, except that its custom_id may be a duplicate.

    In the order custom_id, method, url, body, at most one for each field. Empty for a sound line.
    """
    fault = no_object(raw)
    if fault is not None:
        code, message = fault
        return [BatchError(code, message, None, line)]
    request = orjson.loads(raw)
    faults = (
        *_custom_id(request),
        *_method(request),
        *_url(request, expectation),
        *_body(request, expectation),
    )
    return [BatchError(code, message, param, line) for code, message, param in faults]


_Fault = tuple[str, str, str]


def _custom_id(request: dict[str, Any]) -> Iterator[_Fault]:
    yield from _string(request, "custom_id")
    custom_id = request.get("custom_id")
    if custom_id == "":
        yield (
            "invalid_value",
            "Invalid 'custom_id': it is empty. Give the request a name of its own.",
            "custom_id",
        )
    elif type(custom_id) is str and len(custom_id) > MAX_CUSTOM_ID_CHARS:
        message = (
            "Invalid 'custom_id': string too long. Expected a string with maximum length "
            f"{MAX_CUSTOM_ID_CHARS}, but got a string with length {len(custom_id)} instead."
        )
        yield "string_above_max_length", message, "custom_id"


def _method(request: dict[str, Any]) -> Iterator[_Fault]:
    yield from _string(request, "method")
    method = request.get("method")
    if type(method) is str and method != "POST":
        message = f"Invalid value: {_quote(method)}. Supported values are: 'POST'."
        yield "invalid_value", message, "method"


def _url(request: dict[str, Any], expectation: Expectation) -> Iterator[_Fault]:
    yield from _string(request, "url")
    url = request.get("url")
    if type(url) is str and url != expectation.endpoint:
        message = (
            "The URL provided for this request does not match the batch endpoint. "
            f"It is {_quote(url)}; write '{expectation.endpoint}', or create the batch for "
            "another endpoint."
        )
        yield "invalid_url", message, "url"


def _body(request: dict[str, Any], expectation: Expectation) -> Iterator[_Fault]:
    body = request.get("body")
    if "body" not in request:
        yield _missing("body", request, "body")
        return
    if type(body) is not dict:
        message = f"Invalid type for 'body': expected an object, but got {_kind(body)} instead."
        yield "invalid_request", message, "body"
        return
    yield from _model(body, expectation)
    # The body of a line for another endpoint is right in its own way: its url is the one fault.
    if request.get("url") in (None, expectation.endpoint):
        for field in missing_fields(expectation.endpoint, body):
            yield _missing(field, body, f"body.{field}")
    if body.get("stream") is True:
        message = (
            f"{_TITLE[expectation.endpoint]}: Streaming is not supported in the Batch API. "
            "Remove 'stream' or set it to false."
        )
        yield "streaming_unsupported", message, "body.stream"


def _model(body: dict[str, Any], expectation: Expectation) -> Iterator[_Fault]:
    model = body.get("model")
    served = expectation.served_models
    if model is None:
        yield _missing("model", body, "body.model")
    elif type(model) is not str:
        message = f"Invalid type for 'model': expected a string, but got {_kind(model)} instead."
        yield "invalid_request", message, "body.model"
    elif model not in served or len(model) > MAX_NAME_CHARS:
        message = (
            f"The provided model {_quote(model)} is not supported by the Batch API. "
            f"{_choices('Models served here', served)}"
        )
        yield "model_not_found", message, "body.model"
    elif expectation.endpoint not in served[model]:
        message = (
            f"The model {_quote(model)} does not serve '{expectation.endpoint}'. "
            f"{_choices('It serves', served[model])}"
        )
        yield "invalid_value", message, "body.model"
    elif expectation.file_model is not None and model != expectation.file_model:
        message = (
            f"The model {_quote(model)} differs from {_quote(expectation.file_model)}, which the "
            "file begins with. A batch has one model: put requests for another into another batch."
        )
        yield "mismatched_model", message, "body.model"


def _string(request: dict[str, Any], name: str) -> Iterator[_Fault]:
    """The fault of a field that is missing or no string."""
    if name not in request:
        yield _missing(name, request, name)
    elif type(request[name]) is not str:
        message = (
            f"Invalid type for '{name}': expected a string, but got {_kind(request[name])} instead."
        )
        yield "invalid_request", message, name


def _missing(name: str, fields: dict[str, Any], param: str) -> _Fault:
    message = f"Missing required parameter: '{name}'."
    meant = (_plain(name), *_ELSEWHERE.get(name, ()))
    near = next((key for key in fields if key != name and _plain(key) in meant), None)
    if near is not None:
        message += f" The key {_quote(near)} is near it: write '{name}'."
    return "missing_required_parameter", message, param


def _plain(key: str) -> str:
    """A key without what is easily mistyped."""
    return "".join(key.split()).replace("_", "").replace("-", "").lower()


def _kind(value: Any) -> str:
    """A JSON value's type, with its article."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value)) or ("an array" if type(value) is list else "an object")


def _quote(text: str) -> str:
    """In single quotes, shortened where long; what nobody would see is shown as an escape."""
    shown = text if len(text) <= _QUOTED_CHARS else f"{text[:_QUOTED_CHARS]}…"
    if not shown.isprintable():
        shown = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in shown)
    return f"'{shown}'"


def _choices(title: str, names: Iterable[str]) -> str:
    known = sorted(names)
    if not known:
        return f"{title}: none yet."
    shown = ", ".join(_quote(name) for name in known[:_LISTED_MODELS])
    rest = len(known) - _LISTED_MODELS
    return f"{title}: {shown}." if rest <= 0 else f"{title}: {shown} and {rest} more."
