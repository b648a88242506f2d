"""Of any bytes each line is a request or at fault, and the faults are those of a plain judge."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.store.domain.index.line_index import LineIndexer
from services.store.domain.validation import validate
from tests.kit.jsonl_files import CHAT, MAX_LINE, files, lines
from tests.kit.plain_lines import judge, plain

pytestmark = pytest.mark.unit

SERVED = {
    "m": frozenset({CHAT}),
    "m2": frozenset({CHAT, "/v1/embeddings"}),
    "e": frozenset({"/v1/embeddings"}),
}
LIMITS = validate.Limits(max_line_bytes=MAX_LINE, max_reported_errors=10_000)


def _line(custom_id: str, model: str, url: str) -> bytes:
    body = {"model": model, "messages": [0]}
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(line, separators=(",", ":")).encode()


nearly_sound = st.builds(
    _line,
    st.sampled_from(["a", "b", "c", "\u2028", "d\0"]),
    st.sampled_from(["m", "m", "m", "m2", "e", "none"]),
    st.sampled_from([CHAT, CHAT, CHAT, "/v1/embeddings"]),
)
"""Most of them would run, were it not for the others."""

mixed = st.builds(
    lambda bom, parts: bom + b"".join(line + stop for line, stop in parts),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(
        st.tuples(nearly_sound | lines, st.sampled_from([b"\n", b"\r\n", b"\n\n"])), max_size=12
    ),
)


@given(mixed | files | st.binary(max_size=80))
@example(b"")
@example(_line("a", "m", CHAT))
@example(_line("a", "m", CHAT) + b"\n" + _line("a", "m2", CHAT) + b"\n\n{}\r\n[]")
def test_each_line_is_a_request_or_at_fault(data: bytes) -> None:
    indexer = LineIndexer(max_lines=1_000, max_line_bytes=MAX_LINE, key=b"key")
    indexer.feed(data)
    index = indexer.finish()
    slow = plain(data, MAX_LINE)

    def read_line(ordinal: int) -> bytes:
        offset, length = index.span(ordinal)
        return data[offset : offset + length]

    found = validate.faults(index, read_line, endpoint=CHAT, served_models=SERVED, limits=LIMITS)
    if not slow.requests:
        assert [error.code for error in found] == ["empty_file"]
        return
    assert sorted((e.line or 0, e.code, e.param or "") for e in found) == sorted(
        (line, code, param or "") for line, code, param in judge(slow, CHAT, SERVED)
    )
    assert [error.line for error in found] == sorted(error.line or 0 for error in found)
    assert all(error.message for error in found)

    # They add up: no line is both, and none is neither.
    at_fault = {error.line for error in found}
    sound = [number for _, _, number, _ in slow.requests if number not in at_fault]
    assert len(sound) + len(at_fault) == index.lines == len(slow.requests)
    for ordinal in range(index.lines):
        if index.physical_line(ordinal) not in at_fault:
            request = json.loads(read_line(ordinal))
            assert (request["method"], request["url"]) == ("POST", CHAT)
            assert CHAT in SERVED[request["body"]["model"]]
