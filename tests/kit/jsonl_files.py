"""Any bytes that somebody may upload as a batch input, more often near to one than not."""

import json

from hypothesis import strategies as st

MAX_LINE = 120
"""What the tests set as `max_line_bytes`, so that lines about as long are tried."""
CHAT = "/v1/chat/completions"

scalars = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        "",
        "a",
        "b",
        "POST",
        "post",
        CHAT,
        "m",
        "\u2028",
        "😀",
        [],
        {},
        ["x"],
    ]
)
bodies = st.dictionaries(
    st.sampled_from(["model", "messages", "prompt", "input", "stream", "é"]), scalars, max_size=4
)
objects = st.dictionaries(
    st.sampled_from(["custom_id", "method", "url", "body", " method"]), scalars | bodies, max_size=5
)
broken = st.sampled_from(
    [
        b'{"custom_id":"x"',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":"\\ud83d"}',
        b'{"a":"\\ude00\\ud83d"}',
        b'{"a":"\xe9"}',
        b'{"a":"\xed\xa0\xbd"}',
        b"\xff",
        b"\xef\xbb\xbf{}",
        b"[1]",
        b"1",
        b'"x"',
        b"{}{}",
        b"{} x",
        b'{"a":01}',
        b"{'a':1}",
        b'{"a":"\t"}',
        b"\x00",
        b"{}\x0c",
        b'{"custom_id":1,"custom_id":"a"}',
        b'{"custom_id":"a","custom_id":1}',
        b'{"body":{"model":"m"},"body":{}}',
        b"{}\r",
        b"{}\r{}",
        b"\xe2\x80\xa8",
    ]
)
blank = st.sampled_from(
    [
        b"",
        b" ",
        b"\t \t",
        b"\r",
        b"\x0b",
        b"\x0c",
        b" \xc2\xa0",
        b"\xe3\x80\x80",
        b" " * (MAX_LINE + 1),
    ]
)
lines = st.one_of(
    objects.map(lambda o: json.dumps(o, ensure_ascii=False).encode()),
    objects.map(lambda o: json.dumps(o).encode()),
    broken,
    blank,
    st.integers(MAX_LINE - 3, MAX_LINE + 8).map(lambda n: b'"' + b"x" * (n - 2) + b'"'),
    st.binary(max_size=12),
)
files = st.builds(
    lambda bom, parts, end: bom + b"".join(line + stop for line, stop in parts)[: -1 or None] + end,
    st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\xef\xbb"]),
    st.lists(st.tuples(lines, st.sampled_from([b"\n", b"\n", b"\r\n"])), max_size=20),
    st.sampled_from([b"", b"\n", b"\r", b"\r\n"]),
)
