"""Whole files of the kinds that users of batch services stumble over, from bytes to outcome.

An outcome is `ok N` (requests), `failed` with the physical lines reported, or `refused` with a
word of the upload's 400.
"""

import json

import pytest

from services.kit.wire.result_line import custom_id_json
from services.store.domain.index.body_shape import Shape, refusal
from services.store.domain.index.line_index import BOM, LineIndex, LineIndexer
from services.store.domain.validation import validate
from services.store.domain.validation.explain import custom_id_of

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
SERVED = {"tiny": frozenset({CHAT, "/v1/embeddings"})}


def line(custom_id: str = "a", say: str = "hi", extra: str = "", url: str = CHAT) -> bytes:
    return (
        f'{{"custom_id":"{custom_id}","method":"POST","url":"{url}","body":{{"model":"tiny",'
        f'"messages":[{{"role":"user","content":"{say}"}}]{extra}}}}}'
    ).encode()


A, B, C = line("a"), line("b"), line("c")


def index_of(data: bytes) -> LineIndex:
    indexer = LineIndexer(max_lines=100, max_line_bytes=10_000, key=b"k")
    indexer.feed(data)
    return LineIndex.from_bytes(indexer.finish().to_bytes())


def outcome(data: bytes) -> str:
    index = index_of(data)
    shape = validate.unreadable(index)
    if shape is not None:
        return f"refused {refusal(shape)}"

    def read_line(ordinal: int) -> bytes:
        offset, length = index.span(ordinal)
        return data[offset : offset + length]

    errors = validate.faults(
        index, read_line, endpoint=CHAT, served_models=SERVED, limits=validate.Limits()
    )
    if errors:
        return "failed " + ",".join(str(error.line) for error in errors)
    for ordinal in range(index.lines):
        json.loads(read_line(ordinal))
    return f"ok {index.lines}"


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        ("byte-order mark", BOM + A + b"\n" + B, "ok 2"),
        ("mark before a CRLF line", BOM + A + b"\r\n" + B, "ok 2"),
        ("CRLF, no last line end", A + b"\r\n" + B + b"\r\n" + C, "ok 3"),
        ("blank lines", b"\n" + A + b"\n\n \t\n" + B + b"\n\n\n", "ok 2"),
        ("wide blanks", f"\u00a0\n{A.decode()}\n \u3000\u2028\r\n".encode(), "ok 1"),
        ("only wide blanks", "\u00a0\n\u2003\u205f".encode(), "refused"),
        ("a blank that is seen by nobody", A + b"\n\xe2\x80\x8b\n", "failed 2"),
        ("half a blank", A + b"\n\xc2\n\xa0\n" + B, "failed 2,3"),
        ("blank lines, one broken", b"\n" + A + b"\n\n{broken\n" + B, "failed 4"),
        ("broken first line", b"{broken\n" + B, "failed 1"),
        ("Latin-1", A + b"\n" + line("b", "caf\u00e9").decode().encode("latin-1"), "failed 2"),
        ("U+2028 in strings", line("a\u2028b", "x\u2029y") + b"\n" + B, "ok 2"),
        ("duplicate", A + b"\n" + B + b"\n" + A, "failed 3"),
        ("id no string", A + b"\n" + A.replace(b'"a"', b"1") + b"\n" + B, "failed 2"),
        ("key with a space", A + b"\n" + B.replace(b'"method"', b'" method"'), "failed 2"),
        ("stream", A + b"\n" + line("b", extra=',"stream":true'), "failed 2"),
        ("no stream", A + b"\n" + line("b", extra=',"stream":false'), "ok 2"),
        ("absolute url", A + b"\n" + line("b", url="https://x.example" + CHAT), "failed 2"),
        ("url of another endpoint", A + b"\n" + line("b", url="/v1/embeddings"), "failed 2"),
        ("bodies an engine refuses", line("a", extra=',"max_tokens":-1'), "ok 1"),
        ("lone surrogate", A + b"\n" + line("b", "\\ud83d") + b"\n" + C, "failed 2"),
        ("whole surrogates", A + b"\n" + line("b", "\\ud83d\\ude00"), "ok 2"),
        ("NaN", A + b"\n" + line("b", extra=',"top_p":NaN'), "failed 2"),
        ("Infinity", A + b"\n" + line("b", extra=',"top_p":-Infinity'), "failed 2"),
        ("too large a number", A + b"\n" + line("b", extra=',"top_p":1e999'), "failed 2"),
        ("a line too long", A + b"\n" + line("b", "w" * 10_000) + b"\n" + C, "failed 2"),
        ("nothing but a line too long", line("a", "w" * 10_000), "failed 1"),
        ("nothing but lines too long", BOM + (line("a", "w" * 10_000) + b"\n") * 2, "failed 1,2"),
        ("an array too long for a line", b"[" + A + b" " * 10_000 + b"]", "refused"),
        ("array", json.dumps([json.loads(A)], indent=2).encode(), "refused"),
        ("empty", b"", "refused"),
        ("blank", b" \n\n", "refused"),
        ("UTF-16", A.decode().encode("utf-16"), "refused"),
    ],
)
def test_outcome(kind: str, data: bytes, expected: str) -> None:
    assert kind
    assert outcome(data).startswith(expected)


CUT = A.removesuffix(b"}")
PRETTY = json.dumps(json.loads(A), indent=1).encode()


@pytest.mark.parametrize("kind", [A + A, A + b",", A.replace(b'"', b"'"), CUT, b"{x" + A])
@pytest.mark.parametrize("lines", [2, 3])
def test_lines_with_one_fault_all_are_not_taken_for_spread_json(kind: bytes, lines: int) -> None:
    assert outcome(b"\n".join([kind] * lines)) == "refused " + refusal(Shape.LINES)


@pytest.mark.parametrize(
    "extra", [',"top_p":NaN', ',"user":"\\ud83d"', ',"user":"\\x"', ',"top_p":1e999', ',"seed":']
)
def test_bodies_with_one_fault_all_are_not_taken_for_spread_json(extra: str) -> None:
    kind = line("a", extra=extra + "9" * 400 if extra.endswith(":") else extra)
    assert outcome(kind + b"\n" + kind) == "refused " + refusal(Shape.LINES)


@pytest.mark.parametrize(
    "data",
    [
        PRETTY,
        PRETTY.replace(b"\n", b"\r\n") + b"\r\n" + PRETTY,
        BOM + PRETTY + b"\n" + PRETTY,
        PRETTY.replace(b"hi", b"x" * 2_000),
        PRETTY.replace(b"hi", "\u00e9".encode() * 300),
        CUT[:30].replace(b",", b",\n") + CUT[30:].replace(b",", b",\n") + b"}",
    ],
)
def test_json_that_is_spread_over_lines_is_said_to_be(data: bytes) -> None:
    assert outcome(data) == "refused " + refusal(Shape.PRETTY)


def test_ids_come_back_as_they_were() -> None:
    data = BOM + line("r1") + b"\r\n" + line("r2\u2028x") + b"\r\n"
    index = index_of(data)
    ids = []
    for ordinal in range(index.lines):
        offset, length = index.span(ordinal)
        raw = data[offset : offset + length]
        assert raw.startswith(b"{")
        assert raw.endswith(b"}")
        ids.append(custom_id_of(raw))
    assert ids == ["r1", "r2\u2028x"]
    assert custom_id_json(ids[1]) == b'"r2\\u2028x"'
