"""What a client sends, checked: bodies, queries and forms become wire messages or a clear 400."""

import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import orjson

from protos.nightshift.v1 import batches_pb2, files_pb2
from services.kit.wire.client_numbers import check_range
from services.kit.wire.endpoints import ENDPOINTS
from services.kit.wire.errors import InvalidRequestError, NotFoundError
from services.kit.wire.ids import is_public_id

PURPOSES: Final = ("fine-tune", "assistants", "batch", "user_data", "vision", "evals")
"""Purposes that an upload may have, in the order in which OpenAI lists them."""

MIN_EXPIRY_SECONDS: Final = 3_600
MAX_EXPIRY_SECONDS: Final = 2_592_000
MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_KEY: Final = 64
MAX_METADATA_VALUE: Final = 512
MAX_ID_CHARACTERS: Final = 512
MAX_IDEMPOTENCY_KEY: Final = 255
MAX_FILES_LIMIT: Final = 10_000
MAX_BATCHES_LIMIT: Final = 100

_BATCH_FIELDS: Final = (
    "input_file_id",
    "endpoint",
    "completion_window",
    "metadata",
    "output_expires_after",
)
_REQUIRED: Final = _BATCH_FIELDS[:3]
# Python reads 4,300 digits at most.
_WHOLE_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,4000}")


def no_such_file(file_id: str, *, param: str = "id") -> NotFoundError:
    """Return the error for a file that does not exist in this project, named by `param`."""
    return NotFoundError(f"No such File object: {file_id[:MAX_ID_CHARACTERS]}", param=param)


def no_such_batch(batch_id: str, *, param: str | None = None) -> NotFoundError:
    """Return the error for a batch that does not exist in this project."""
    return NotFoundError(f"No batch found with id '{batch_id[:MAX_ID_CHARACTERS]}'.", param=param)


def file_id_of(text: str, *, param: str = "id") -> str:
    """Return `text`, which `param` holds, where it can be an id.

    Raises:
        NotFoundError: it cannot, so that no such file exists.
    """
    if not is_public_id(text):
        raise no_such_file(text, param=param)
    return text


def batch_id_of(text: str, *, param: str | None = None) -> str:
    """Return `text`, which `param` holds, where it can be an id.

    Raises:
        NotFoundError: it cannot, so that no such batch exists.
    """
    if not is_public_id(text):
        raise no_such_batch(text, param=param)
    return text


def idempotency_key_of(text: str) -> str | None:
    """Return the key under which a client creates something; None where it sent none.

    Raises:
        InvalidRequestError: it is longer than 255 characters, or has others than printable ASCII.
    """
    if not text:
        return None
    if len(text) > MAX_IDEMPOTENCY_KEY or not (text.isascii() and text.isprintable()):
        raise InvalidRequestError(
            f"Invalid 'Idempotency-Key': expected 1 to {MAX_IDEMPOTENCY_KEY} printable ASCII "
            "characters.",
            code="invalid_value",
            param="Idempotency-Key",
        )
    return text


def limit_of(query: Mapping[str, str], *, default: int, maximum: int) -> int:
    """Return a list's `limit`.

    Raises:
        InvalidRequestError: it is no whole number from 1 to `maximum`.
    """
    text = query.get("limit", "")
    if not text:
        return default
    if not _WHOLE_NUMBER.fullmatch(text):
        wrong_type("limit", "an integer", "a string")
    limit = int(text)
    check_range("limit", limit, 1, maximum)
    return limit


def is_ascending(query: Mapping[str, str]) -> bool:
    """Tell whether a list is asked for oldest first.

    Raises:
        InvalidRequestError: `order` is neither `asc` nor `desc`.
    """
    order = query.get("order") or "desc"
    check_value("order", order, ("asc", "desc"))
    return order == "asc"


def purpose_of(value: str) -> str:
    """Return an upload's purpose.

    Raises:
        InvalidRequestError: it is none that an upload may have.
    """
    if value not in PURPOSES:
        raise InvalidRequestError(
            f"'{value[:100]}' is not one of {list(PURPOSES)} - 'purpose'", param="purpose"
        )
    return value


def form_expiry(anchor: str | None, seconds: str | None) -> files_pb2.ExpiresAfter | None:
    """Return the expiry that an upload's form asks for; None when it asks for none.

    Raises:
        InvalidRequestError: half of it is missing, or it does not fit.
    """
    if anchor is None and seconds is None:
        return None
    if anchor is None:
        missing("expires_after.anchor")
    if seconds is None:
        missing("expires_after.seconds")
    if not _WHOLE_NUMBER.fullmatch(seconds):
        wrong_type("expires_after.seconds", "an integer", "a string")
    # Before it is put in a message, which holds 64 bits.
    check_range("expires_after.seconds", int(seconds), MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS)
    expiry = files_pb2.ExpiresAfter(anchor=anchor, seconds=int(seconds))
    check_expiry("expires_after", expiry)
    return expiry


def check_expiry(name: str, expiry: files_pb2.ExpiresAfter) -> None:
    """Refuse an expiry that does not fit.

    Raises:
        InvalidRequestError: the anchor is unknown, or the seconds are out of range.
    """
    check_value(f"{name}.anchor", expiry.anchor, ("created_at",))
    check_range(f"{name}.seconds", expiry.seconds, MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS)


def parse_create_batch(body: bytes) -> batches_pb2.CreateBatchRequest:
    """Return the request that a JSON body makes; its values are not checked yet.

    Raises:
        InvalidRequestError: not JSON, a field is unknown, missing or of the wrong type.
    """
    fields = parse_object(body)
    for name in fields:
        if name not in _BATCH_FIELDS:
            raise InvalidRequestError(
                f"Unknown parameter: '{name[:100]}'.", code="unknown_parameter", param=name[:100]
            )
    for name in _REQUIRED:
        if name not in fields:
            missing(name)
    request = batches_pb2.CreateBatchRequest(
        input_file_id=text_of("input_file_id", fields["input_file_id"]),
        endpoint=text_of("endpoint", fields["endpoint"]),
        completion_window=text_of("completion_window", fields["completion_window"]),
    )
    metadata = fields.get("metadata")
    if metadata is not None:
        for key, value in object_of("metadata", metadata).items():
            request.metadata[key] = text_of(f"metadata.{key[:100]}", value)
        request.has_metadata = True
    expiry = fields.get("output_expires_after")
    if expiry is not None:
        request.output_expires_after.CopyFrom(json_expiry("output_expires_after", expiry))
    return request


def json_expiry(name: str, value: Any) -> files_pb2.ExpiresAfter:
    """Return the expiry that a JSON value asks for.

    Raises:
        InvalidRequestError: it is no such object, or the seconds are out of range.
    """
    fields = object_of(name, value)
    for key in fields:
        if key not in ("anchor", "seconds"):
            raise InvalidRequestError(
                f"Unknown parameter: '{name}.{key[:100]}'.",
                code="unknown_parameter",
                param=f"{name}.{key[:100]}",
            )
    for key in ("anchor", "seconds"):
        if key not in fields:
            missing(f"{name}.{key}")
    anchor = text_of(f"{name}.anchor", fields["anchor"])
    seconds = fields["seconds"]
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        wrong_type(f"{name}.seconds", "an integer", kind_of(seconds))
    check_range(f"{name}.seconds", seconds, MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS)
    return files_pb2.ExpiresAfter(anchor=anchor, seconds=seconds)


def check_create_batch(request: batches_pb2.CreateBatchRequest, windows: Mapping[str, int]) -> None:
    """Check a request's values, and set the length of its window.

    Args:
        request: from REST or gRPC; `completion_window_seconds` is overwritten.
        windows: completion windows by name, in seconds.

    Raises:
        InvalidRequestError: one of the values does not fit.
    """
    if not request.input_file_id:
        raise InvalidRequestError(
            "Invalid 'input_file_id': empty string. Expected a string with minimum length 1, but "
            "got an empty string instead.",
            code="empty_string",
            param="input_file_id",
        )
    check_text("input_file_id", request.input_file_id, MAX_ID_CHARACTERS)
    check_value("endpoint", request.endpoint, ENDPOINTS)
    check_value("completion_window", request.completion_window, tuple(windows))
    check_metadata(request.metadata)
    if request.HasField("output_expires_after"):
        check_expiry("output_expires_after", request.output_expires_after)
    request.completion_window_seconds = windows[request.completion_window]
    request.has_metadata = request.has_metadata or bool(request.metadata)


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Refuse metadata past its limits.

    Raises:
        InvalidRequestError: too many pairs, or one that is too long.
    """
    if len(metadata) > MAX_METADATA_PAIRS:
        raise InvalidRequestError(
            "Invalid 'metadata': too many properties. Expected an object with at most "
            f"{MAX_METADATA_PAIRS} properties, but got an object with {len(metadata)} properties "
            "instead.",
            code="object_above_max_properties",
            param="metadata",
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY:
            raise InvalidRequestError(
                "Invalid property name in 'metadata': name too long. Expected a property name "
                f"with maximum length {MAX_METADATA_KEY}, but got one with length {len(key)} "
                "instead.",
                code="property_name_above_max_length",
                param="metadata",
            )
        check_text("metadata", key, MAX_METADATA_KEY)
        check_text(f"metadata.{key}", value, MAX_METADATA_VALUE)


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the object that a JSON body is; the last of two equal keys wins.

    Raises:
        InvalidRequestError: it is not JSON, or not an object.
    """
    hint = "(HINT: This likely means you aren't using your HTTP library correctly. The API expects"
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        why = f"not valid JSON: {error}" if _is_utf8(body) else "not UTF-8 text"
        raise InvalidRequestError(
            f"We could not parse the JSON body of your request. {hint} a JSON payload, but what "
            f"was sent was {why}.)"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"We could not parse the JSON body of your request. {hint} a JSON object, but what "
            f"was sent was {kind_of(value)}.)"
        )
    return value


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def text_of(name: str, value: Any) -> str:
    """Return a field that must be a string."""
    if not isinstance(value, str):
        wrong_type(name, "a string", kind_of(value))
    return value


def object_of(name: str, value: Any) -> dict[str, Any]:
    """Return a field that must be an object."""
    if not isinstance(value, dict):
        wrong_type(name, "an object", kind_of(value))
    return value


def kind_of(value: Any) -> str:
    """Return what a JSON value is, with its article."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a decimal number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names[type(value)]


def missing(name: str) -> NoReturn:
    """Refuse a request that lacks `name`."""
    raise InvalidRequestError(
        f"Missing required parameter: '{name}'.", code="missing_required_parameter", param=name
    )


def wrong_type(name: str, expected: str, got: str) -> NoReturn:
    """Refuse a value of the wrong type."""
    raise InvalidRequestError(
        f"Invalid type for '{name}': expected {expected}, but got {got} instead.",
        code="invalid_type",
        param=name,
    )


def check_value(name: str, value: str, supported: tuple[str, ...]) -> None:
    """Refuse a value that is not one of `supported`."""
    if value in supported:
        return
    quoted = [f"'{one}'" for one in supported]
    listed = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
    raise InvalidRequestError(
        f"Invalid value: '{value[:100]}'. Supported values are: {listed}.",
        code="invalid_value",
        param=name,
    )


def check_text(name: str, value: str, maximum: int) -> None:
    """Refuse a text of more than `maximum` characters, or one that no database can hold."""
    if len(value) > maximum:
        raise InvalidRequestError(
            f"Invalid '{name}': string too long. Expected a string with maximum length {maximum}, "
            f"but got a string with length {len(value)} instead.",
            code="string_above_max_length",
            param=name,
        )
    if "\0" in value:
        raise InvalidRequestError(
            f"Invalid '{name}': the character U+0000 is not allowed.",
            code="invalid_value",
            param=name,
        )
