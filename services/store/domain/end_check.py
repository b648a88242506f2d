"""Whether the end files of a batch hold each of its lines exactly once, in order."""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from services.kit.wire.result_line import request_id_hex

BEGIN: Final = b'{"id":"batch_req_'
"""How every line of an end file begins."""


class _Response(msgspec.Struct):
    status_code: int


class _Line(msgspec.Struct):
    """What decides into which file a line belongs; all else is read over."""

    response: _Response | None


_decode = msgspec.json.Decoder(_Line).decode


def is_whole_line(pieces: Iterable[bytes], length: int) -> bool:
    """Tell whether these pieces are one line of an end file, `length` bytes with its line end."""
    seen = 0
    for piece in pieces:
        if not seen and not piece.startswith(BEGIN):
            return False
        end = piece.find(b"\n")
        seen += len(piece)
        if end >= 0:
            return seen == length and end == len(piece) - 1
    return False


def outcome_fault(
    batch_id: str, total: int, output: Iterator[bytes], error: Iterator[bytes]
) -> str | None:
    """Return the first thing wrong with a batch's end files, given line by line.

    A line's id tells which request it is of, so that both files are read along with the requests:
    memory is that of two lines.
    """
    heads = {"output": next(output, None), "error": next(error, None)}
    sources = {"output": output, "error": error}
    for ordinal in range(total):
        wanted = BEGIN + request_id_hex(batch_id, ordinal).encode() + b'"'
        for kind, line in heads.items():
            if line is not None and line.startswith(wanted):
                fault = _line_fault(kind, line)
                if fault is not None:
                    return f"line {ordinal} of the batch, in its {kind} file, {fault}"
                heads[kind] = next(sources[kind], None)
                break
        else:
            return f"line {ordinal} of the batch does not come next in its output or error file"
    for kind, line in heads.items():
        if line is not None:
            return f"its {kind} file goes on after its last line"
    return None


def _line_fault(kind: str, line: bytes) -> str | None:
    try:
        response = _decode(line).response
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return "cannot be read"
    good = response is not None and response.status_code // 100 == 2
    if good != (kind == "output"):
        return "belongs into the other file"
    return None
