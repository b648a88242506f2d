"""Lines of output and error files, in final form, spliced around ready bytes.

The executor writes them for lines that ran, the store for lines that never did. Every function
returns exactly one line: it ends with its only line feed, and holds nothing else that
`str.splitlines` would split at. What must change for that is changed without changing a value.
"""

from typing import Final

import orjson
import xxhash

BATCH_EXPIRED: Final = "batch_expired"
BATCH_CANCELLED: Final = "batch_cancelled"
REQUEST_TIMEOUT: Final = "request_timeout"
ENGINE_FAILURE: Final = "engine_failure"
ENGINE_FAILURE_UNTRIED: Final = "engine_failure untried"
"""A reason of its own under the code `engine_failure`."""
RESULT_LOST: Final = "result_lost"
RESULT_TOO_LARGE: Final = "result_too_large"
RESULT_REFUSED: Final = "result_refused"

MESSAGES: Final = {
    BATCH_EXPIRED: ("This request could not be executed before the completion window expired."),
    BATCH_CANCELLED: "This request was not executed because the batch was cancelled.",
    REQUEST_TIMEOUT: (
        "This request ran longer than the time allowed for one request and was aborted. "
        "Ask for fewer tokens, or raise line_timeout_seconds."
    ),
    ENGINE_FAILURE: (
        "The engine died each time it ran this request alone, so the request was given up. "
        "Check its parameters and size."
    ),
    ENGINE_FAILURE_UNTRIED: (
        "This request was in the engine with others of its batch when it died. The batch had ended "
        "so many engines by then that it was not tried alone and may be sound: send it again in a "
        "batch without those that failed."
    ),
    RESULT_LOST: (
        "This request ran, but its result was lost from the server's storage. Send it again."
    ),
    RESULT_TOO_LARGE: (
        "This request ran, but its result has {size} bytes. {reason} Ask for less in one request, "
        "such as fewer inputs or no log probabilities, or have the operator raise "
        "NIGHTSHIFT_STORE_MAX_RESULT_BYTES."
    ),
    RESULT_REFUSED: (
        "This request ran, but the store did not take its result. {reason} Send it again, or show "
        "this to the operator."
    ),
}
"""The sentence for each reason of a line without a response; a code is a reason's first word. Some
have places for details."""

_ANSWERED: Final = (
    b'{"id":"batch_req_%b","custom_id":%b,'
    b'"response":{"status_code":%d,"request_id":"%b","body":%b},"error":null}\n'
)
_UNANSWERED: Final = (
    b'{"id":"batch_req_%b","custom_id":%b,"response":null,"error":{"code":"%b","message":%b}}\n'
)


def request_id_hex(batch_id: str, line: int) -> str:
    """32 lowercase hex digits, always the same for a batch and an ordinal, so that a line that is
    written again is the same line."""
    return xxhash.xxh3_128_hexdigest(f"{batch_id}:{line}".encode())


def one_line(json: bytes) -> bytes:
    """The same JSON value (which must be valid JSON, of any layout) without line breaks.

    Covers what splits at LF and what `str.splitlines` splits at besides: CR, U+0085, U+2028 and
    U+2029. Returns its argument where nothing is to be done.
    """
    # In valid JSON, CR and LF stand only between tokens, where a space means the same; the other
    # three only inside strings, where their escape means the same.
    if b"\n" in json or b"\r" in json:
        json = json.replace(b"\n", b" ").replace(b"\r", b" ")
    if not json.isascii():
        # Looked for by one byte first: that is ten times faster, and most text lacks it.
        if b"\xe2" in json and b"\xe2\x80" in json:
            json = json.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
        if b"\xc2" in json:
            json = json.replace(b"\xc2\x85", b"\\u0085")
    return json


def custom_id_json(custom_id: str) -> bytes:
    """`custom_id` as a JSON string on one line, equal in value. Raises TypeError for a lone
    surrogate, which no indexed line holds."""
    return one_line(orjson.dumps(custom_id))


def success_or_error_line(
    batch_id: str,
    line: int,
    custom_id_json: bytes,
    status: int,
    body: bytes,
    request_id: str,
) -> bytes:
    """The line of a request that ran: the answer's status and body, whatever they say.

    `line` is the ordinal in the batch; `custom_id_json` a JSON string, quotes included, as it
    stands in the input; `body` one valid JSON value, put in as it is; `request_id` plain ASCII.
    """
    return _ANSWERED % (
        xxhash.xxh3_128_hexdigest(f"{batch_id}:{line}".encode()).encode(),
        one_line(custom_id_json),
        status,
        request_id.encode(),
        one_line(body),
    )


def no_response_line(
    batch_id: str, line: int, custom_id_json: bytes | None, code: str, **details: object
) -> bytes:
    """The line of a request without an answer. `code`: a key of `MESSAGES`; KeyError otherwise.

    `details` fill the places in its sentence. Without a custom id, since the input was lost, the
    message says which request it is.
    """
    message = MESSAGES[code].format(**details)
    if custom_id_json is None:
        message = f"{_UNNAMED.format(number=line + 1)} {message}"
    return _UNANSWERED % (
        request_id_hex(batch_id, line).encode(),
        b"null" if custom_id_json is None else one_line(custom_id_json),
        code.partition(" ")[0].encode(),
        one_line(orjson.dumps(message)),
    )


def custom_id_of(line: bytes) -> bytes:
    """The custom id of a line that these functions wrote, as the JSON that stands there."""
    start = line.index(_CUSTOM_ID) + len(_CUSTOM_ID)
    # No quote of a string stands bare, so that this cannot be part of the id.
    return line[start : line.index(_RESPONSE, start)]


_CUSTOM_ID: Final = b',"custom_id":'
_RESPONSE: Final = b',"response":'
_UNNAMED: Final = (
    "Request {number} of the input file (the first is 1, empty lines do not count), whose "
    "custom_id was lost from the server's storage."
)
# Without the message's begin, which names a request whose custom id was lost.
_NEVER_RAN_ENDS: Final = tuple(
    b"%b}}\n" % orjson.dumps(MESSAGES[code])[1:] for code in (BATCH_EXPIRED, BATCH_CANCELLED)
)


def never_ran(line: bytes) -> bool:
    """Tell whether `no_response_line` wrote this line for a request that no engine was given.

    The end of such a line suffices: that of an answered one names no code.
    """
    return line.endswith(_NEVER_RAN_ENDS)
