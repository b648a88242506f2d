"""The one error table: error class → gRPC code → HTTP status → OpenAI's type, code, retryable.

    NightshiftError
    ├── InvalidRequestError     400
    ├── AuthenticationError     401
    ├── PermissionError_        403
    ├── NotFoundError           404
    ├── MethodNotAllowedError   405
    ├── ConflictError           409  never retried
    │   └── StaleTermError      409  the caller no longer leads
    ├── TooLargeError           413
    ├── UnsupportedMediaError   415
    ├── RangeNotSatisfiableError 416
    ├── RateLimitedError        429
    ├── InternalError           500
    ├── LostError               500  never retried
    └── UnavailableError        503

Servicers and routes raise these; interceptors and the gateway's envelope turn them into an answer.
"""

from collections.abc import Iterator
from typing import ClassVar, Final

import grpc
from google.protobuf import any_pb2
from google.rpc import status_pb2
from grpc_status import rpc_status

from protos.nightshift.v1 import common_pb2

_MOST_MESSAGE_BYTES: Final = 1_200
"""gRPC drops metadata above 8 KiB, and a message goes there twice, each byte as up to three."""


def _within_metadata(message: str) -> str:
    """Leave out the middle of a message that quotes something endless."""
    encoded = message.encode(errors="replace")
    if len(encoded) <= _MOST_MESSAGE_BYTES:
        return message
    half = _MOST_MESSAGE_BYTES // 2
    head, tail = encoded[:half], encoded[-half:]
    return f"{head.decode(errors='ignore')} … {tail.decode(errors='ignore')}"


class NightshiftError(Exception):
    """Something a caller is told; the message says what to change."""

    grpc_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = True

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        """Describe the error in OpenAI's terms: `code` and `param` are null when absent."""
        message = _within_metadata(message)
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds


class InvalidRequestError(NightshiftError):
    """The request cannot be taken as it stands."""

    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    type = "invalid_request_error"
    retryable = False


class AuthenticationError(InvalidRequestError):
    """No key, or a wrong one."""

    grpc_code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class PermissionError_(InvalidRequestError):  # noqa: N801 - the plain name is a builtin's
    """The key is known and may not do this."""

    grpc_code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403


class NotFoundError(InvalidRequestError):
    """No such object in this project."""

    grpc_code = grpc.StatusCode.NOT_FOUND
    http_status = 404


class MethodNotAllowedError(InvalidRequestError):
    """The route exists, the method does not."""

    grpc_code = grpc.StatusCode.UNIMPLEMENTED
    http_status = 405


class ConflictError(InvalidRequestError):
    """The object's state does not allow it; repeating cannot help."""

    grpc_code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 409


class StaleTermError(ConflictError):
    """The caller's leadership is over."""

    grpc_code = grpc.StatusCode.ABORTED


class TooLargeError(InvalidRequestError):
    """More bytes than the limit that the message names."""

    grpc_code = grpc.StatusCode.OUT_OF_RANGE
    http_status = 413


class UnsupportedMediaError(InvalidRequestError):
    """The content type or encoding is not one that the route takes."""

    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 415


class RangeNotSatisfiableError(InvalidRequestError):
    """The bytes asked for lie outside the file."""

    grpc_code = grpc.StatusCode.OUT_OF_RANGE
    http_status = 416


class RateLimitedError(NightshiftError):
    """Too many requests; wait as long as it says."""

    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    type = "requests"


class InternalError(NightshiftError):
    """A fault of ours; its cause is in the log under the error id that the message names."""


class LostError(NightshiftError):
    """Stored content is not there any more; only who runs this server can put it back."""

    grpc_code = grpc.StatusCode.DATA_LOSS
    retryable = False


class UnavailableError(NightshiftError):
    """Cannot answer now; trying again later can help."""

    grpc_code = grpc.StatusCode.UNAVAILABLE
    http_status = 503


def all_error_classes(root: type[NightshiftError] = NightshiftError) -> Iterator[type]:
    """Walk the table, `root` first; a subclass made elsewhere travels as its parent."""
    yield root
    for child in root.__subclasses__():
        if child.__module__ == __name__:
            yield from all_error_classes(child)


_SHARED_STATUS: Final = frozenset({grpc.StatusCode.ABORTED, grpc.StatusCode.DATA_LOSS})
"""Codes of errors whose HTTP status is another one's, too."""

_BY_HTTP_STATUS: dict[int, type[NightshiftError]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    403: PermissionError_,
    404: NotFoundError,
    405: MethodNotAllowedError,
    409: ConflictError,
    413: TooLargeError,
    415: UnsupportedMediaError,
    416: RangeNotSatisfiableError,
    429: RateLimitedError,
    500: InternalError,
    503: UnavailableError,
}

_BY_GRPC_CODE: dict[grpc.StatusCode, type[NightshiftError]] = {
    grpc.StatusCode.DATA_LOSS: LostError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionError_,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: ConflictError,
    grpc.StatusCode.ABORTED: StaleTermError,
    grpc.StatusCode.OUT_OF_RANGE: TooLargeError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: UnavailableError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: UnavailableError,
    grpc.StatusCode.CANCELLED: UnavailableError,
}


def to_status(error: NightshiftError) -> status_pb2.Status:
    """Return the `google.rpc.Status` of an error, its OpenAI fields packed as `ErrorDetail`."""
    detail = common_pb2.ErrorDetail(
        type=error.type,
        http_status=error.http_status,
        retryable=error.retryable,
        code=error.code,
        param=error.param,
        retry_after_seconds=error.retry_after_seconds,
    )
    packed = any_pb2.Any()
    packed.Pack(detail)
    number: int = error.grpc_code.value[0]
    return status_pb2.Status(code=number, message=error.message, details=[packed])


def from_rpc_error(failure: grpc.aio.AioRpcError) -> NightshiftError:
    """Return the error that the other side raised, or the nearest one for a transport fault."""
    status = rpc_status.from_call(failure)  # type: ignore[arg-type]  # aio calls fit at run time
    for packed in status.details if status is not None else ():
        detail = common_pb2.ErrorDetail()
        if not packed.Unpack(detail):
            continue
        kind = _BY_HTTP_STATUS.get(detail.http_status, InternalError)
        if failure.code() in _SHARED_STATUS:
            kind = _BY_GRPC_CODE[failure.code()]
        return kind(
            failure.details() or "",
            code=detail.code if detail.HasField("code") else None,
            param=detail.param if detail.HasField("param") else None,
            retry_after_seconds=(
                detail.retry_after_seconds if detail.HasField("retry_after_seconds") else None
            ),
        )
    kind = _BY_GRPC_CODE.get(failure.code(), InternalError)
    if issubclass(kind, UnavailableError):
        return kind(
            "The service behind this request is not available right now; try again.",
            retry_after_seconds=1.0,
        )
    return kind(failure.details() or failure.code().name)
