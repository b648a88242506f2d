"""Multipart bodies as a stream of events: a part is handed on while it arrives, in any order.

The grammar is python-multipart's; what is ours is that nothing is collected but short fields.
"""

import re
from dataclasses import dataclass
from email.message import Message
from typing import Any, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from services.kit.wire.errors import InvalidRequestError

MAX_FIELD_BYTES: Final = 4_096
"""Largest value of a field that is no file."""

MAX_PARTS: Final = 64
"""Parts of one body; a form has at most four that mean something."""

MAX_HEADER_BYTES: Final = 20 * 1024
"""Longest header of a part: a filename as long as may be, and as wide."""

# Browsers, httpx and undici write these three so, and never escape the per cent sign itself.
_ESCAPED: Final = re.compile(r"%(22|0D|0A)")


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file begins; its content follows as `FileData`."""

    name: str
    filename: str


@dataclass(frozen=True, slots=True)
class FileData:
    """Some of the file that began last."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Field:
    """A whole field that is no file."""

    name: str
    value: str


Event = FilePart | FileData | Field


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a `Content-Type` header names.

    Raises:
        InvalidRequestError: it is no multipart form, or names none.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        shown = kind.decode("latin-1")[:100] or "none"
        raise InvalidRequestError(
            f"Invalid Content-Type header ({shown}), expected multipart/form-data. "
            "(HINT: with curl, use -F file=@FILE -F purpose=batch)",
            code="unsupported_content_type",
        )
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:
        raise InvalidRequestError(
            "The Content-Type header must name the form's boundary, of 1 to 70 characters."
        )
    return boundary


class MultipartReader:
    """Turns chunks of a body into events."""

    def __init__(self, boundary: bytes) -> None:
        """Read a body whose parts are separated by `boundary`."""
        self._events: list[Event] = []
        self._headers: dict[bytes, bytes] = {}
        self._header_name = b""
        self._header_value = b""
        self._parts = 0
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_text,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
            },
            max_header_size=MAX_HEADER_BYTES,
        )

    def feed(self, chunk: bytes) -> list[Event]:
        """Return what `chunk` completes, in order.

        Raises:
            InvalidRequestError: the body is no multipart form, or a field is too long.
        """
        self._events = []
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            reason = str(error).rstrip(".")
            raise InvalidRequestError(
                f"The multipart body is malformed: {reason}. (HINT: let your HTTP library make the "
                "body and its Content-Type together, so that both have the same boundary)"
            ) from None
        return self._events

    def close(self) -> None:
        """Check that the body ended where it says.

        Raises:
            InvalidRequestError: it broke off.
        """
        if self._parser.state != MultipartState.END:
            raise InvalidRequestError("The multipart body ends before its closing boundary.")

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidRequestError(f"The multipart body has more than {MAX_PARTS} parts.")
        self._headers = {}
        self._value = bytearray()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _header_text(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _headers_finished(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"").decode("latin-1")
        kind, options = parse_options_header(disposition)
        name = options.get(b"name")
        if kind != b"form-data" or name is None:
            raise InvalidRequestError(
                "Each part of a multipart body needs a Content-Disposition of form-data with a "
                "name."
            )
        self._name = _text(name)
        filename = _extended_filename(disposition)
        if filename is None and b"filename" in options:
            filename = _text(options[b"filename"])
        self._is_file = filename is not None
        if filename is not None:
            self._events.append(FilePart(self._name, filename))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._events.append(FileData(data[start:end]))
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequestError(
                f"The field '{self._name[:100]}' is longer than {MAX_FIELD_BYTES} bytes. "
                "(HINT: a file is sent as a part with a filename; with curl, -F file=@FILE)"
            )

    def _part_end(self) -> None:
        if self._is_file:
            return
        try:
            value = self._value.decode()
        except UnicodeDecodeError:
            raise InvalidRequestError(
                f"The field '{self._name[:100]}' is not UTF-8 text."
            ) from None
        self._events.append(Field(self._name, value))


def _extended_filename(disposition: str) -> str | None:
    """Return the name that `filename*` gives; None where there is none that can be read.

    RFC 7578 forbids it, so that the parser leaves it out, and .NET and old Python clients send it
    for names beyond ASCII, with a mangled `filename` beside it or with none.
    """
    if "filename*" not in disposition.lower():
        return None
    message = Message()
    message["content-disposition"] = disposition
    # A value in the extended form is a triple, whatever the annotation says.
    params: list[tuple[str, Any]] = message.get_params([], "content-disposition")
    for name, value in params:
        if name == "filename" and isinstance(value, tuple):
            charset, _, text = value
            try:
                return str(text.encode("latin-1"), charset or "utf-8")
            except (LookupError, UnicodeError):
                return None
    return None


def _text(raw: bytes) -> str:
    """Return a name as the client meant it: raw UTF-8, with the form encoding's three escapes.

    Raises:
        InvalidRequestError: it is not UTF-8.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        shown = raw.decode(errors="backslashreplace")[:100]
        raise InvalidRequestError(
            f"The name '{shown}' in the multipart body is not UTF-8 text. Send it as UTF-8."
        ) from None
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)
