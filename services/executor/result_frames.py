"""Finished lines on their way to the store: collected per attempt, cut into frames."""

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from protos.nightshift.v1 import work_pb2
from services.executor.engines.base import Usage
from services.kit.wire.errors import NightshiftError, TooLargeError
from services.kit.wire.frames import FAILED_FLAG, FRAME_BYTES, RESULT_RECORD
from services.kit.wire.result_line import (
    RESULT_REFUSED,
    RESULT_TOO_LARGE,
    custom_id_of,
    no_response_line,
)

if TYPE_CHECKING:
    from services.executor.attempts import Attempt

RESULT_FRAME_BYTES: Final = 256 * 1024 - 1
"""Payload at which results are sent without waiting for more, in bytes: the most that the store
keeps in a row of its own."""

_MOST: Final = 2**32 - 1
# The eight fields of RESULT_RECORD; a packed record is three times cheaper than a numpy row.
_RECORD: Final = struct.Struct("<8I")
_pack: Final = _RECORD.pack
assert RESULT_RECORD.itemsize == _RECORD.size


def error_instead(batch_id: str, line: int, text: bytes, error: NightshiftError) -> bytes:
    """Return the error line of a request whose result line the store does not take."""
    code = RESULT_TOO_LARGE if isinstance(error, TooLargeError) else RESULT_REFUSED
    return no_response_line(
        batch_id, line, custom_id_of(text), code, size=len(text), reason=error.message
    )


class Frame:
    """Results of one attempt, sent together and acknowledged together."""

    __slots__ = ("attempt", "failures", "is_error", "number", "payload", "records")

    def __init__(
        self, attempt: "Attempt", records: bytes, payload: bytes, *, is_error: bool = False
    ) -> None:
        self.attempt = attempt
        self.records = records
        self.payload = payload
        self.is_error = is_error
        """Whether it stands for a result that the store did not take."""
        self.number = 0
        """Number in the stream that it was last sent on."""
        self.failures = 0
        """How often the store refused the stream at this frame."""

    @property
    def lines(self) -> int:
        """Number of result lines."""
        return len(self.records) // _RECORD.size

    def instead(self, error: NightshiftError) -> "list[Frame]":
        """Return what to send instead of it, once the store has refused it for good.

        That is each line by itself, so that only what is refused fails; then an error instead of
        the line; then nothing.
        """
        if self.is_error:
            return []
        frames = []
        is_alone = self.lines == 1
        for line, offset, length, *counts in _RECORD.iter_unpack(self.records):
            text = self.payload[offset : offset + length]
            if is_alone:
                text = error_instead(self.attempt.dispatch.batch_id, line, text, error)
            rest = (FAILED_FLAG, 0, 0, 0, 0) if is_alone else counts
            record = _pack(line, 0, len(text), *rest)
            frames.append(Frame(self.attempt, record, text, is_error=is_alone))
        return frames

    def messages(self) -> Iterator[work_pb2.AppendResultsRequest]:
        """Return what goes over the wire: more than one message for a line above a frame."""
        payload, token, number = self.payload, self.attempt.token, self.number
        records = self.records
        for offset in range(0, len(payload), FRAME_BYTES):
            yield work_pb2.AppendResultsRequest(
                token=token,
                frame=number,
                records=records,
                payload=payload[offset : offset + FRAME_BYTES],
                more=offset + FRAME_BYTES < len(payload),
            )
            records = b""


class ResultBuffer:
    """Result lines of one attempt that are not yet in a frame."""

    __slots__ = ("_parts", "_records", "since", "size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._records: list[bytes] = []
        self.size = 0
        """Bytes of its result lines."""
        self.since = 0.0
        """Monotonic seconds at which its first line came."""

    def __len__(self) -> int:
        """Return the number of result lines."""
        return len(self._parts)

    def fits(self, text: bytes) -> bool:
        """Tell whether `text` still belongs into the same frame."""
        return not self._parts or self.size + len(text) <= RESULT_FRAME_BYTES

    def add(self, line: int, text: bytes, flags: int, usage: Usage) -> None:
        """Append a result line, its line end included."""
        self._records.append(
            _pack(
                line,
                self.size,
                len(text),
                flags,
                min(usage.input_tokens, _MOST),
                min(usage.cached_tokens, _MOST),
                min(usage.output_tokens, _MOST),
                min(usage.reasoning_tokens, _MOST),
            )
        )
        self._parts.append(text)
        self.size += len(text)

    def take(self, attempt: "Attempt") -> Frame:
        """Return all of it as a frame and be empty."""
        frame = Frame(attempt, b"".join(self._records), b"".join(self._parts))
        self._parts = []
        self._records = []
        self.size = 0
        return frame
