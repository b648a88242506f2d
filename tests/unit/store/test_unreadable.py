"""What is said of a line that is no JSON: where it breaks, and what to change."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.domain.validation.unreadable import NOT_JSON, unreadable

pytestmark = pytest.mark.unit


def said_of(raw: bytes) -> str:
    with pytest.raises(orjson.JSONDecodeError) as caught:
        orjson.loads(raw)
    return unreadable(raw, caught.value)


@pytest.mark.parametrize(
    ("raw", "ending"),
    [
        (b'{"a":1},', "(column 8). Remove the comma: only the line's end separates requests."),
        (b'{"a":1} {"b":2}', "(column 9). Write each request on a line of its own."),
        (b'{"a":1},{"b":2},', "Write each request on a line of its own."),
        (b'{"a":1}\r{"b":2}', "Write each request on a line of its own."),
        (b'{"a":1} // x', "Remove what follows the object."),
        (b'{"a":1}\xe2\x80\xa8{}', "Write each request on a line of its own."),
        (b'{"a":"x', "and a line break inside a text as \\n."),
        (b"{", "and a line break inside a text as \\n."),
        (b'{"a":"x\ty"}', "(column 8). Write it as the escape \\u0009."),
        (b'{"a":"\xc3\xa9\0"}', "(column 8). Write it as the escape \\u0000."),
        (b'{"a":"\\x41"}', "Write a backslash inside a text as \\\\."),
        (b'{"a":' + b"[" * 2_000, "1024 levels are allowed."),
        (b"{'a':1}", "Write keys and texts in double quotes."),
        (b"{a:1}", "Write keys and texts in double quotes."),
        (b"{\"a\":'x'}", "Write keys and texts in double quotes."),
        ("{\u201ca\u201d:1}".encode(), 'Write straight double quotes (").'),
        (b'{"a":None}', "Write null, true or false."),
        (b'{"a":True}', "Write null, true or false."),
        (
            b'{"a":"say "hi" x"}',
            'Write a quote inside a text as \\", and a comma between two fields.',
        ),
        (b'{"a":"x" "b":1}', 'Write a quote inside a text as \\", and a comma between two fields.'),
        (b"# comment", "remove this line, or what stands before its '{'."),
        (b"```json", "remove this line, or what stands before its '{'."),
        (b"[", "remove this line, or what stands before its '{'."),
        (b'\x1e{"a":1}', "remove this line, or what stands before its '{'."),
        (b"\xc2\xa0{}", "remove this line, or what stands before its '{'."),
        (b"\xef\xbb\xbf{}", "it may only be the first thing in the file."),
        (b'{"a":1,}', "Trailing comma is not allowed (column 7)."),
        (b'{"a":NaN}', "not JSON (column 6). Write null, or leave the field out."),
        (b'{"a":-Infinity}', "not JSON (column 7). Write null, or leave the field out."),
        (b'{"a":' + b"9" * 400 + b"}", "is too large (column 6). At most 1.79e308 can be written."),
        (b'{"a":-' + b"9" * 5_000 + b"}", "(column 6). At most 1.79e308 can be written."),
        (b'{"a":"\\ud83d"}', "the character itself (column 7)."),
        (b'{"a":"\xe9"}', "byte 0xe9 at position 7. Save the file as UTF-8."),
    ],
)
def test_it_says_what_to_change(raw: bytes, ending: str) -> None:
    said = said_of(raw)
    assert said.startswith(NOT_JSON)
    assert said.endswith(ending)


@given(
    st.one_of(
        st.binary(max_size=40),
        st.text(alphabet="{}[]\",:\\'ab1 \t\0\u00e9\u2028\ufeff\U0001f319", max_size=40).map(
            str.encode
        ),
    )
)
def test_any_line_gets_one_line_of_advice(raw: bytes) -> None:
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        said = unreadable(raw, error)
        assert said.startswith(NOT_JSON)
        assert said.isprintable()
