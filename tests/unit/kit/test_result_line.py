"""Result lines are one line each, strict JSON, and equal in value to what was put in."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.wire import result_line

pytestmark = pytest.mark.unit

BATCH = "batch_0198c0ffee0070008000000000000001"
REQUEST = "0123456789abcdef0123456789abcdef"
# Drawn often enough: what splits lines, what JSON escapes, and what shares bytes with a splitter.
text = st.text(
    st.sampled_from('\u2028\u2029\u0085\x0b\x0c\x1c\r\n\\"é\u2013\u202a\u00a5😀a')
    | st.characters(exclude_categories=("Cs",)),
    max_size=30,
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


def assert_one_line(line: bytes) -> Any:
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert len(line.decode().splitlines()) == 1
    parsed = json.loads(line)
    assert list(parsed) == ["id", "custom_id", "response", "error"]
    assert parsed["id"].startswith("batch_req_")
    assert len(parsed["id"]) == len("batch_req_") + 32
    return parsed


@given(
    values, text, st.sampled_from(["", "\n", "\r\n", "\r"]), st.booleans(), st.integers(100, 599)
)
def test_answered_line(
    value: Any, custom_id: str, line_end: str, ascii_only: bool, status: int
) -> None:
    indent = 2 if line_end else None
    body = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    # Raw line feeds stand between tokens only, so that this changes the layout alone.
    body = body.replace(b"\n", line_end.encode())
    quoted = json.dumps(custom_id, ensure_ascii=ascii_only).encode()
    line = result_line.success_or_error_line(BATCH, 7, quoted, status, body, REQUEST)
    parsed = assert_one_line(line)
    assert parsed["custom_id"] == custom_id
    assert json.loads(result_line.custom_id_of(line)) == custom_id
    assert parsed["error"] is None
    assert parsed["response"] == {"status_code": status, "request_id": REQUEST, "body": value}


def test_ready_bytes_stay_as_they_are() -> None:
    """No number is read and written anew: 2**70 and 1.10 come back as they were sent."""
    body = b'{"a":1180591620717411303424,"b":1.10,"c":"\\u2028\\/"}'
    line = result_line.success_or_error_line(BATCH, 0, b'"\\u0061"', 200, body, REQUEST)
    assert body in line
    assert b'"custom_id":"\\u0061"' in line


@given(text)
def test_custom_id_json(custom_id: str) -> None:
    quoted = result_line.custom_id_json(custom_id)
    assert json.loads(quoted) == custom_id
    assert len(quoted.decode().splitlines()) == 1


@pytest.mark.parametrize("code", sorted(result_line.MESSAGES))
def test_unanswered_line(code: str) -> None:
    details = {"size": 1, "reason": "an\u2028\n odd one"}
    line = result_line.no_response_line(BATCH, 3, b'"a\xe2\x80\xa8"', code, **details)
    parsed = assert_one_line(line)
    assert parsed["custom_id"] == "a\u2028"
    assert parsed["response"] is None
    assert set(parsed["error"]) == {"code", "message"}
    assert parsed["error"]["code"] == code.split(maxsplit=1)[0]
    assert orjson.loads(line) == parsed


def test_expiry_sentence_is_the_documented_one() -> None:
    assert result_line.MESSAGES[result_line.BATCH_EXPIRED] == (
        "This request could not be executed before the completion window expired."
    )


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(KeyError):
        result_line.no_response_line(BATCH, 0, b'"a"', "oops")


def test_ids_repeat_for_a_line_and_differ_between_lines() -> None:
    ids = {result_line.request_id_hex(b, n) for b in (BATCH, BATCH[:-1]) for n in range(1000)}
    assert len(ids) == 2000
    assert all(len(i) == 32 and int(i, 16) >= 0 for i in ids)
    # Fixed for good: a store of another version must write the same line.
    assert result_line.request_id_hex(BATCH, 0) == "47bc01476b62597810a4e25e581affa0"
