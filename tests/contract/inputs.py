"""Batch inputs with one kind of trouble each, as users of batch services meet them.

Built here rather than kept as files, since editors and tools mend such files unasked.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.kit.batches import CHAT, Json, chat

BOM: Final = b"\xef\xbb\xbf"

URL: Final = f'"url":"{CHAT}"'


def text(line: Json) -> bytes:
    """One line, without an end."""
    return json.dumps(line, ensure_ascii=False).encode()


def joined(*lines: bytes, end: bytes = b"\n") -> bytes:
    """Lines, each with an end."""
    return b"".join(line + end for line in lines)


def without(line: Json, *path: str) -> bytes:
    """A line that lacks a field."""
    copy = json.loads(json.dumps(line))
    inside = copy
    for name in path[:-1]:
        inside = inside[name]
    del inside[path[-1]]
    return text(copy)


A, B, C = (chat(name, f"text of {name}") for name in "abc")
_A, _B, _C = text(A), text(B), text(C)
_EMBEDDING: Final = text(
    {
        "custom_id": "b",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": "simulated", "input": "hello"},
    }
)


@dataclass(frozen=True, kw_only=True)
class Completes:
    """The batch completes."""

    lines: dict[str, str | None]
    """custom_id → the text that is answered, None for an error line; in the order of the input."""


@dataclass(frozen=True, kw_only=True)
class Fails:
    """The batch fails before any line ran, with exactly these faults in this order."""

    faults: tuple[tuple[int | None, str, str | None], ...]
    """Line, code, param."""
    says: str = ""
    """A part of the first message."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The upload is answered 400."""

    says: str


@dataclass(frozen=True, kw_only=True)
class Input:
    """A file and what must become of it."""

    name: str
    data: bytes | Callable[[], bytes]
    outcome: Completes | Fails | Refused

    def content(self) -> bytes:
        """The file; large ones are made only here."""
        return self.data if isinstance(self.data, bytes) else self.data()


_ABC: Final = Completes(lines={name: f"text of {name}" for name in "abc"})
_AB: Final = Completes(lines={name: f"text of {name}" for name in "ab"})
_MISSING: Final = "missing_required_parameter"
_FORMAT: Final = "Invalid file format for Batch API. Must be .jsonl"


def _fails(line: int | None, code: str, param: str | None, says: str = "") -> Fails:
    return Fails(faults=((line, code, param),), says=says)


def _second(changed: bytes) -> bytes:
    return joined(_A, changed, _C)


INPUTS: Final = (
    # --- what cannot be misunderstood runs ---------------------------------------------------
    Input(name="byte-order mark", data=BOM + joined(_A, _B, _C), outcome=_ABC),
    Input(name="mark and CRLF", data=BOM + joined(_A, _B, _C, end=b"\r\n"), outcome=_ABC),
    Input(name="CRLF, last line open", data=b"\r\n".join([_A, _B, _C]), outcome=_ABC),
    Input(name="blank lines", data=b"\n \t\n" + _A + b"\n\n\r\n" + _B + b"\n\n  \n", outcome=_AB),
    Input(name="blanks around a line", data=joined(b"  " + _A + b"\t ", _B), outcome=_AB),
    Input(
        name="U+2028 and U+2029 in strings",
        data=joined(_A, text(chat("u\u2028x", "one\u2028two\u2029three")), _C),
        outcome=Completes(
            lines={
                "a": "text of a",
                "u\u2028x": "one\u2028two\u2029three",
                "c": "text of c",
            }
        ),
    ),
    Input(
        name="stream is false",
        data=_second(text(chat("b", "text of b", stream=False))),
        outcome=_ABC,
    ),
    Input(
        name="top log-probabilities",
        data=joined(*(text(chat(n, n, logprobs=True, top_logprobs=20)) for n in "xy")),
        outcome=Completes(lines={"x": "x", "y": "y"}),
    ),
    Input(
        name="unknown keys beside the four",
        data=_second(text({**B, "priority": 1, "comment": None})),
        outcome=_ABC,
    ),
    Input(
        name="the last of equal keys wins",
        data=_second(b'{"custom_id":"x","custom_id":"b",' + _B.split(b",", 1)[1]),
        outcome=_ABC,
    ),
    Input(
        name="escapes in keys and values",
        data=_second(
            _B.replace(b'"custom_id"', b'"custom\\u005fid"').replace(b"POST", b"P\\u004fST")
        ),
        outcome=_ABC,
    ),
    Input(
        name="numbers beyond a float's precision",
        data=_second(text(chat("b", "text of b", seed=2**63 - 1, user="9" * 400))),
        outcome=_ABC,
    ),
    Input(
        name="ids that differ in case and accents",
        data=joined(*(text(chat(n, n)) for n in ("id", "ID", "id ", "e\u0301", "\u00e9"))),
        outcome=Completes(lines={n: n for n in ("id", "ID", "id ", "e\u0301", "\u00e9")}),
    ),
    # --- what only an engine can judge is its line's error --------------------------------------
    Input(
        name="every line refused",
        data=joined(
            text(chat("a", max_tokens=-1)),
            text(chat("b", temperature="hot")),
            text(chat("c", n=0)),
        ),
        outcome=Completes(lines={"a": None, "b": None, "c": None}),
    ),
    Input(
        name="one line refused",
        data=_second(text(chat("b", max_tokens=-1))),
        outcome=Completes(lines={"a": "text of a", "b": None, "c": "text of c"}),
    ),
    Input(
        name="a context too long",
        data=_second(text(chat("b", "w " * 100_001))),
        outcome=Completes(lines={"a": "text of a", "b": None, "c": "text of c"}),
    ),
    # --- faults are found before anything runs ------------------------------------------------
    Input(
        name="a broken line after blank ones",
        data=b"\n" + joined(_A, b"", _B[:-3]) + _C,
        outcome=_fails(4, "invalid_json_line", None),
    ),
    Input(
        name="a broken first line",
        data=joined(b"{", _B),
        outcome=_fails(1, "invalid_json_line", None),
    ),
    Input(
        name="Latin-1",
        data=_second(text(chat("b", "caf\u00e9")).decode().encode("latin-1")),
        outcome=_fails(2, "invalid_json_line", None, "UTF-8"),
    ),
    Input(
        name="NaN and Infinity",
        data=joined(_A, _B[:-2] + b',"temperature":NaN}}', _C[:-2] + b',"temperature":-Infinity}}'),
        outcome=Fails(faults=((2, "invalid_json_line", None), (3, "invalid_json_line", None))),
    ),
    Input(
        name="two objects on a line",
        data=joined(_A, _B + _C),
        outcome=_fails(2, "invalid_json_line", None),
    ),
    Input(
        name="a trailing comma",
        data=joined(_A, _B + b","),
        outcome=_fails(2, "invalid_json_line", None),
    ),
    Input(name="no object", data=_second(b"[1]"), outcome=_fails(2, "invalid_request", None)),
    Input(name="a bare string", data=_second(b'"b"'), outcome=_fails(2, "invalid_request", None)),
    Input(
        name="a repeated custom_id",
        data=joined(text(chat("same", "1")), _B, text(chat("same", "2"))),
        outcome=_fails(3, "duplicate_custom_id", "custom_id", "same"),
    ),
    Input(
        name="a custom_id repeated by an escape",
        data=joined(_A, _B, _A.replace(b'"a"', b'"\\u0061"')),
        outcome=_fails(3, "duplicate_custom_id", "custom_id"),
    ),
    Input(
        name="custom_ids that are no strings",
        data=joined(
            _A, *(_B.replace(b'"b"', each, 1) for each in (b"1", b"null", b'["b"]', b'""'))
        ),
        outcome=Fails(
            faults=(
                *((line, "invalid_request", "custom_id") for line in (2, 3, 4)),
                (5, "invalid_value", "custom_id"),
            )
        ),
    ),
    Input(
        name="a custom_id too long",
        data=_second(text(chat("x" * 513))),
        outcome=_fails(2, "string_above_max_length", "custom_id", "512"),
    ),
    Input(
        name="a key with a space",
        data=_second(_B.replace(b'"method"', b'" method"')),
        outcome=_fails(2, _MISSING, "method", "Missing required parameter: 'method'."),
    ),
    Input(
        name="missing fields",
        data=joined(
            *(without(chat(name), name) for name in ("custom_id", "method", "url", "body")),
            without(chat("e"), "body", "model"),
            without(chat("f"), "body", "messages"),
            text(chat("g")),
        ),
        outcome=Fails(
            faults=(
                (1, _MISSING, "custom_id"),
                (2, _MISSING, "method"),
                (3, _MISSING, "url"),
                (4, _MISSING, "body"),
                (5, _MISSING, "body.model"),
                (6, _MISSING, "body.messages"),
            )
        ),
    ),
    Input(
        name="method GET",
        data=_second(_B.replace(b"POST", b"GET")),
        outcome=_fails(2, "invalid_value", "method"),
    ),
    Input(
        name="stream is true",
        data=joined(_A, text(chat("b", stream=True)), text(chat("c", stream=False))),
        outcome=_fails(
            2,
            "streaming_unsupported",
            "body.stream",
            "Chat Completions: Streaming is not supported in the Batch API.",
        ),
    ),
    Input(
        name="an absolute url",
        data=_second(_B.replace(b'"/v1', b'"https://api.example.com/v1')),
        outcome=_fails(2, "invalid_url", "url"),
    ),
    Input(
        name="a url without v1",
        data=_second(_B.replace(b'"/v1', b'"')),
        outcome=_fails(2, "invalid_url", "url", CHAT),
    ),
    Input(
        name="another endpoint's line",
        data=_second(_EMBEDDING),
        outcome=_fails(2, "invalid_url", "url"),
    ),
    Input(
        name="an unknown model",
        data=joined(text(chat("a", model="gpt-nope"))),
        outcome=_fails(
            1,
            "model_not_found",
            "body.model",
            "The provided model 'gpt-nope' is not supported by the Batch API.",
        ),
    ),
    Input(
        name="two models",
        data=_second(text(chat("b", model="poison"))),
        outcome=_fails(2, "mismatched_model", "body.model"),
    ),
    Input(
        name="too many lines",
        data=lambda: b"".join(
            b'{"custom_id":"%d","method":"POST",%s,"body":{"model":"simulated","messages":[{}]}}\n'
            % (number, URL.encode())
            for number in range(50_001)
        ),
        outcome=_fails(None, "too_many_tasks", None, "50"),
    ),
    Input(
        name="a line too long",
        data=lambda: _second(text(chat("b", "w" * (16 << 20)))),
        outcome=_fails(2, "line_too_long", None),
    ),
    # --- no batch input at all ------------------------------------------------------------------
    Input(
        name="a JSON array",
        data=json.dumps([A, B], indent=2).encode(),
        outcome=Refused(says=_FORMAT),
    ),
    Input(
        name="an array on one line", data=json.dumps([A, B]).encode(), outcome=Refused(says=_FORMAT)
    ),
    Input(name="empty", data=b"", outcome=Refused(says=_FORMAT)),
    Input(name="only blank lines", data=b"\n \r\n\t\n", outcome=Refused(says=_FORMAT)),
    Input(
        name="a table", data=b"custom_id,text\na,hello\nb,night\n", outcome=Refused(says=_FORMAT)
    ),
    Input(name="UTF-16", data=_A.decode().encode("utf-16"), outcome=Refused(says="utf-8")),
    Input(name="bytes", data=bytes(range(256)) * 16, outcome=Refused(says="")),
)
