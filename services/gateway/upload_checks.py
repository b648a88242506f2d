"""What a client says of an upload, checked."""

from collections.abc import Mapping
from typing import Any, Final

from protos.nightshift.v1 import uploads_pb2
from services.gateway import checks
from services.kit.wire.client_numbers import check_range
from services.kit.wire.errors import InvalidRequestError, NotFoundError
from services.kit.wire.ids import is_public_id

MAX_FILENAME: Final = 4_096
MAX_MIME_TYPE: Final = 255

_INT64_MAX: Final = 2**63 - 1
_CREATE: Final = ("filename", "purpose", "bytes", "mime_type", "expires_after")
_REQUIRED: Final = _CREATE[:4]
_COMPLETE: Final = ("part_ids", "md5")


def upload_id_of(text: str) -> str:
    """Return `text` where it can be an id.

    Raises:
        NotFoundError: it cannot, so that no such upload exists.
    """
    if not is_public_id(text):
        shown = text[: checks.MAX_ID_CHARACTERS]
        raise NotFoundError(f"No such Upload object: {shown}", param="upload_id")
    return text


def parse_create(body: bytes) -> uploads_pb2.CreateUploadRequest:
    """Return the request that a JSON body makes; its values are not checked yet.

    Raises:
        InvalidRequestError: not JSON, a field is unknown, missing or of the wrong type.
    """
    fields = checks.parse_object(body)
    _refuse_unknown(fields, _CREATE)
    for name in _REQUIRED:
        if name not in fields:
            checks.missing(name)
    size = fields["bytes"]
    if not isinstance(size, int) or isinstance(size, bool):
        checks.wrong_type("bytes", "an integer", checks.kind_of(size))
    # Before it is put in a message, which holds 64 bits.
    check_range("bytes", size, 0, _INT64_MAX)
    request = uploads_pb2.CreateUploadRequest(
        filename=checks.text_of("filename", fields["filename"]),
        purpose=checks.text_of("purpose", fields["purpose"]),
        bytes=size,
        mime_type=checks.text_of("mime_type", fields["mime_type"]),
    )
    expiry = fields.get("expires_after")
    if expiry is not None:
        request.expires_after.CopyFrom(checks.json_expiry("expires_after", expiry))
    return request


def check_create(request: uploads_pb2.CreateUploadRequest) -> None:
    """Check a request's values; limits on sizes are the store's.

    Raises:
        InvalidRequestError: one of the values does not fit.
    """
    if not request.filename:
        raise InvalidRequestError(
            "Invalid 'filename': empty string. Expected a string with minimum length 1, but got an "
            "empty string instead.",
            code="empty_string",
            param="filename",
        )
    checks.check_text("filename", request.filename, MAX_FILENAME)
    checks.check_text("mime_type", request.mime_type, MAX_MIME_TYPE)
    checks.purpose_of(request.purpose)
    if not request.HasField("bytes"):
        checks.missing("bytes")
    if request.HasField("expires_after"):
        checks.check_expiry("expires_after", request.expires_after)


def parse_complete(body: bytes, upload_id: str) -> uploads_pb2.CompleteUploadRequest:
    """Return the request that a JSON body makes.

    Raises:
        InvalidRequestError: not JSON, a field is unknown, missing or of the wrong type.
    """
    fields = checks.parse_object(body)
    _refuse_unknown(fields, _COMPLETE)
    if "part_ids" not in fields:
        checks.missing("part_ids")
    part_ids = fields["part_ids"]
    if not isinstance(part_ids, list):
        checks.wrong_type("part_ids", "an array of strings", checks.kind_of(part_ids))
    md5 = fields.get("md5")
    return uploads_pb2.CompleteUploadRequest(
        upload_id=upload_id,
        part_ids=[
            checks.text_of(f"part_ids[{number}]", part_id)
            for number, part_id in enumerate(part_ids)
        ],
        md5=None if md5 is None else checks.text_of("md5", md5),
    )


def _refuse_unknown(fields: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in fields:
        if name not in known:
            raise InvalidRequestError(
                f"Unknown parameter: '{name[:100]}'.", code="unknown_parameter", param=name[:100]
            )
