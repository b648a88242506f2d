"""Batch inputs with one kind of trouble each, as users of batch services meet them.

Built here rather than kept as files, since editors and tools mend such files unasked.
"""

import bz2
import gzip
import json
import lzma
from typing import Final

from tests.contract.input_kinds import (
    AB,
    ABC,
    BOM,
    EMBEDDING,
    FORMAT,
    LINE_A,
    LINE_B,
    LINE_C,
    MISSING,
    URL,
    A,
    B,
    Completes,
    Fails,
    Input,
    Refused,
    fails,
    joined,
    nested,
    second,
    text,
    without,
)
from tests.kit.batches import CHAT, chat

INPUTS: Final = (
    # --- what cannot be misunderstood runs ---------------------------------------------------
    Input(name="byte-order mark", data=BOM + joined(LINE_A, LINE_B, LINE_C), outcome=ABC),
    Input(
        name="mark and CRLF", data=BOM + joined(LINE_A, LINE_B, LINE_C, end=b"\r\n"), outcome=ABC
    ),
    Input(name="CRLF, last line open", data=b"\r\n".join([LINE_A, LINE_B, LINE_C]), outcome=ABC),
    Input(
        name="blank lines",
        data=b"\n \t\n" + LINE_A + b"\n\n\r\n" + LINE_B + b"\n\n  \n",
        outcome=AB,
    ),
    Input(name="blanks around a line", data=joined(b"  " + LINE_A + b"\t ", LINE_B), outcome=AB),
    Input(
        name="U+2028 and U+2029 in strings",
        data=joined(LINE_A, text(chat("u\u2028x", "one\u2028two\u2029three")), LINE_C),
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
        data=second(text(chat("b", "text of b", stream=False))),
        outcome=ABC,
    ),
    Input(
        name="top log-probabilities",
        data=joined(*(text(chat(n, n, logprobs=True, top_logprobs=20)) for n in "xy")),
        outcome=Completes(lines={"x": "x", "y": "y"}),
    ),
    Input(
        name="unknown keys beside the four",
        data=second(text({**B, "priority": 1, "comment": None})),
        outcome=ABC,
    ),
    Input(
        name="the last of equal keys wins",
        data=second(b'{"custom_id":"x","custom_id":"b",' + LINE_B.split(b",", 1)[1]),
        outcome=ABC,
    ),
    Input(
        name="escapes in keys and values",
        data=second(
            LINE_B.replace(b'"custom_id"', b'"custom\\u005fid"').replace(b"POST", b"P\\u004fST")
        ),
        outcome=ABC,
    ),
    Input(
        name="numbers beyond a float's precision",
        data=second(text(chat("b", "text of b", seed=2**63 - 1, user="9" * 400))),
        outcome=ABC,
    ),
    Input(
        name="the last of equal keys inside a body wins",
        data=second(
            LINE_B.replace(
                b'"body":{', b'"body":{"model":"nope","messages":7,"stream":true,"stream":false,'
            )
        ),
        outcome=ABC,
    ),
    Input(
        name="an escaped NUL in a value",
        data=second(text(chat("b", "text\0of b"))),
        outcome=Completes(lines={"a": "text of a", "b": "text\0of b", "c": "text of c"}),
    ),
    Input(
        name="nested as deep as a line may be",
        data=second(nested(1_022)),
        outcome=ABC,
    ),
    Input(
        name="unknown names of every kind",
        data=second(
            text({**B, "": 1, "\0": 2, "__proto__": {}, "\N{CRESCENT MOON}": [], "Body": 3})
        ),
        outcome=ABC,
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
        data=second(text(chat("b", max_tokens=-1))),
        outcome=Completes(lines={"a": "text of a", "b": None, "c": "text of c"}),
    ),
    Input(
        name="a context too long",
        data=second(text(chat("b", "w " * 100_001))),
        outcome=Completes(lines={"a": "text of a", "b": None, "c": "text of c"}),
    ),
    # --- faults are found before anything runs ------------------------------------------------
    Input(
        name="a broken line after blank ones",
        data=b"\n" + joined(LINE_A, b"", LINE_B[:-3]) + LINE_C,
        outcome=fails(4, "invalid_json_line", None),
    ),
    Input(
        name="a broken first line",
        data=joined(b"{", LINE_B),
        outcome=fails(1, "invalid_json_line", None),
    ),
    Input(
        name="Latin-1",
        data=second(text(chat("b", "caf\u00e9")).decode().encode("latin-1")),
        outcome=fails(2, "invalid_json_line", None, "UTF-8"),
    ),
    Input(
        name="NaN and Infinity",
        data=joined(
            LINE_A,
            LINE_B[:-2] + b',"temperature":NaN}}',
            LINE_C[:-2] + b',"temperature":-Infinity}}',
        ),
        outcome=Fails(faults=((2, "invalid_json_line", None), (3, "invalid_json_line", None))),
    ),
    Input(
        name="numbers beyond a float's range",
        data=second(LINE_B[:-2] + b',"temperature":1e999}}'),
        outcome=fails(2, "invalid_json_line", None),
    ),
    Input(
        name="a bare NUL",
        data=second(LINE_B.replace(b"text of b", b"text\0of b")),
        outcome=fails(2, "invalid_json_line", None),
    ),
    Input(
        name="NUL bytes after the last line",
        data=joined(LINE_A, LINE_B) + bytes(512),
        outcome=fails(3, "invalid_json_line", None),
    ),
    Input(
        name="nested ten thousand deep",
        data=second(nested(10_000)),
        outcome=fails(2, "invalid_json_line", None),
    ),
    Input(
        name="a second byte-order mark",
        data=BOM + joined(LINE_A, BOM + LINE_B, LINE_C),
        outcome=fails(2, "invalid_json_line", None),
    ),
    Input(
        name="encoded surrogates",
        data=second(LINE_B.replace(b"text of b", b"\xed\xa0\xbd\xed\xb2\xa9")),
        outcome=fails(2, "invalid_json_line", None, "UTF-8"),
    ),
    Input(
        name="an overlong encoding",
        data=second(LINE_B.replace(b"text of b", b"\xc0\xaf")),
        outcome=fails(2, "invalid_json_line", None, "UTF-8"),
    ),
    Input(
        name="single quotes",
        data=second(LINE_B.replace(b'"', b"'")),
        outcome=fails(2, "invalid_json_line", None),
    ),
    Input(
        name="two objects on a line",
        data=joined(LINE_A, LINE_B + LINE_C),
        outcome=fails(2, "invalid_json_line", None),
    ),
    Input(
        name="a trailing comma",
        data=joined(LINE_A, LINE_B + b","),
        outcome=fails(2, "invalid_json_line", None),
    ),
    Input(name="no object", data=second(b"[1]"), outcome=fails(2, "invalid_request", None)),
    Input(name="a bare string", data=second(b'"b"'), outcome=fails(2, "invalid_request", None)),
    Input(
        name="a repeated custom_id",
        data=joined(text(chat("same", "1")), LINE_B, text(chat("same", "2"))),
        outcome=fails(3, "duplicate_custom_id", "custom_id", "same"),
    ),
    Input(
        name="a custom_id repeated by an escape",
        data=joined(LINE_A, LINE_B, LINE_A.replace(b'"a"', b'"\\u0061"')),
        outcome=fails(3, "duplicate_custom_id", "custom_id"),
    ),
    Input(
        name="custom_ids that are no strings",
        data=joined(
            LINE_A, *(LINE_B.replace(b'"b"', each, 1) for each in (b"1", b"null", b'["b"]', b'""'))
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
        data=second(text(chat("x" * 513))),
        outcome=fails(2, "string_above_max_length", "custom_id", "512"),
    ),
    Input(
        name="a key with a space",
        data=second(LINE_B.replace(b'"method"', b'" method"')),
        outcome=fails(2, MISSING, "method", "Missing required parameter: 'method'."),
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
                (1, MISSING, "custom_id"),
                (2, MISSING, "method"),
                (3, MISSING, "url"),
                (4, MISSING, "body"),
                (5, MISSING, "body.model"),
                (6, MISSING, "body.messages"),
            )
        ),
    ),
    Input(
        name="fields of wrong types",
        data=joined(
            *(
                text({**chat(name), **changed})
                for name, changed in (
                    ("a", {"method": 1}),
                    ("b", {"url": ["/v1/chat/completions"]}),
                    ("c", {"body": "{}"}),
                    ("d", {"body": []}),
                    ("e", {"body": None}),
                    ("f", {"body": {"model": 7, "messages": [{}]}}),
                )
            ),
            text(chat("g")),
        ),
        outcome=Fails(
            faults=(
                (1, "invalid_request", "method"),
                (2, "invalid_request", "url"),
                (3, "invalid_request", "body"),
                (4, "invalid_request", "body"),
                (5, "invalid_request", "body"),
                (6, "invalid_request", "body.model"),
            )
        ),
    ),
    Input(
        name="a NUL in the model's name",
        data=joined(text(chat("a", model="simu\0lated"))),
        outcome=fails(1, "model_not_found", "body.model"),
    ),
    Input(
        name="method GET",
        data=second(LINE_B.replace(b"POST", b"GET")),
        outcome=fails(2, "invalid_value", "method"),
    ),
    Input(
        name="stream is true",
        data=joined(LINE_A, text(chat("b", stream=True)), text(chat("c", stream=False))),
        outcome=fails(
            2,
            "streaming_unsupported",
            "body.stream",
            "Chat Completions: Streaming is not supported in the Batch API.",
        ),
    ),
    Input(
        name="an absolute url",
        data=second(LINE_B.replace(b'"/v1', b'"https://api.example.com/v1')),
        outcome=fails(2, "invalid_url", "url"),
    ),
    Input(
        name="a url without v1",
        data=second(LINE_B.replace(b'"/v1', b'"')),
        outcome=fails(2, "invalid_url", "url", CHAT),
    ),
    Input(
        name="another endpoint's line",
        data=second(EMBEDDING),
        outcome=fails(2, "invalid_url", "url"),
    ),
    Input(
        name="an unknown model",
        data=joined(text(chat("a", model="gpt-nope"))),
        outcome=fails(
            1,
            "model_not_found",
            "body.model",
            "The provided model 'gpt-nope' is not supported by the Batch API.",
        ),
    ),
    Input(
        name="two models",
        data=second(text(chat("b", model="poison"))),
        outcome=fails(2, "mismatched_model", "body.model"),
    ),
    Input(
        name="too many lines",
        data=lambda: b"".join(
            b'{"custom_id":"%d","method":"POST",%s,"body":{"model":"simulated","messages":[{}]}}\n'
            % (number, URL.encode())
            for number in range(50_001)
        ),
        outcome=fails(None, "too_many_tasks", None, "50"),
    ),
    Input(
        name="a line too long",
        data=lambda: second(text(chat("b", "w" * (16 << 20)))),
        outcome=fails(2, "line_too_long", None),
    ),
    Input(
        name="a line of too many values",
        data=lambda: second(text(chat("b") | {"more": [{}] * 25_001})),
        outcome=fails(2, "too_many_values", None),
    ),
    # --- no batch input at all ------------------------------------------------------------------
    Input(
        name="a JSON array",
        data=json.dumps([A, B], indent=2).encode(),
        outcome=Refused(says=FORMAT),
    ),
    Input(
        name="an array on one line", data=json.dumps([A, B]).encode(), outcome=Refused(says=FORMAT)
    ),
    Input(name="no sound line", data=b"\n" + LINE_A[:-1], outcome=Refused(says="Line 2: This")),
    Input(name="empty", data=b"", outcome=Refused(says=FORMAT)),
    Input(name="only blank lines", data=b"\n \r\n\t\n", outcome=Refused(says=FORMAT)),
    Input(name="a table", data=b"custom_id,text\na,hello\nb,night\n", outcome=Refused(says=FORMAT)),
    Input(name="gzip", data=gzip.compress(joined(LINE_A, LINE_B)), outcome=Refused(says="gzip")),
    Input(
        name="ZIP",
        data=b"PK\x03\x04\x14\0\0\0\x08\0" + bytes(range(256)),
        outcome=Refused(says="ZIP"),
    ),
    Input(name="bzip2", data=bz2.compress(joined(LINE_A, LINE_B)), outcome=Refused(says="utf-8")),
    Input(name="xz", data=lzma.compress(joined(LINE_A, LINE_B)), outcome=Refused(says="utf-8")),
    Input(
        name="lone carriage returns",
        data=joined(LINE_A, LINE_B, end=b"\r"),
        outcome=Refused(says=FORMAT),
    ),
    Input(
        name="spread over several lines",
        data=json.dumps(A, indent=2).encode(),
        outcome=Refused(says=FORMAT),
    ),
    Input(name="UTF-32", data=LINE_A.decode().encode("utf-32"), outcome=Refused(says="")),
    Input(name="NUL bytes", data=bytes(4_096), outcome=Refused(says="")),
    Input(name="UTF-16", data=LINE_A.decode().encode("utf-16"), outcome=Refused(says="utf-8")),
    Input(name="bytes", data=bytes(range(256)) * 16, outcome=Refused(says="")),
)
