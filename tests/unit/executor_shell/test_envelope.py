"""Input lines from frames, whatever the cuts."""

import sys

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.input_lines import LineReader, read_line
from services.kit.wire.frames import LINE_RECORD

pytestmark = pytest.mark.unit


def test_custom_id_and_body_are_taken_as_they_stand() -> None:
    line = read_line(
        7,
        rb' {"body" : {"a": 1.50, "b": "\u00e9\/"} ,"url":"/", "custom_id":"a\u0062\"c", "x":[]}',
    )
    assert line.number == 7
    assert line.custom_id == rb'"a\u0062\"c"'
    assert line.body == rb'{"a": 1.50, "b": "\u00e9\/"}'
    assert (line.retries, line.counted) == (0, 0)


def test_of_a_repeated_name_the_last_value_counts() -> None:
    line = read_line(0, b'{"custom_id":"a","body":{"n":1},"custom_id":"b","body":{"n":2}}')
    assert (line.custom_id, line.body) == (b'"b"', b'{"n":2}')


def test_a_name_written_with_escapes_is_the_same_name() -> None:
    line = read_line(0, rb'{"custom\u005fid":"a","body":{}}')
    assert line.custom_id == b'"a"'


@pytest.mark.parametrize(
    ("text", "custom_id"),
    [
        (b"not json", b"null"),
        (b"[1]", b"null"),
        (b'{"custom_id":"a"}', b'"a"'),
        (b'{"custom_id":"a","body":' + b"[" * 5_000 + b"]" * 5_000 + b"}", b"null"),
    ],
)
def test_what_cannot_be_read_has_no_body(text: bytes, custom_id: bytes) -> None:
    line = read_line(0, text)
    assert (line.custom_id, line.body) == (custom_id, b"")


@pytest.mark.parametrize("levels", [900, 1_000, 1_022])
def test_a_line_as_deep_as_the_index_takes_is_read(levels: int) -> None:
    body = b'{"x":' + b"[" * levels + b"]" * levels + b"}"
    text = b'{"custom_id":"a","body":' + body + b"}"
    orjson.loads(text)  # the index's parser
    limit = sys.getrecursionlimit()
    line = read_line(0, text)
    assert (line.custom_id, line.body) == (b'"a"', body)
    assert sys.getrecursionlimit() == limit


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=30),
    frame_bytes=st.integers(40, 400),
)
def test_lines_are_whole_however_they_are_cut_into_frames(
    sizes: list[int], frame_bytes: int
) -> None:
    texts = [
        orjson.dumps({"custom_id": str(number), "body": {"t": "x" * size}})
        for number, size in enumerate(sizes)
    ]
    reader = LineReader()
    found = []
    records: list[tuple[int, int]] = []
    payload = b""

    def send(part: bytes) -> None:
        table = np.array(records, dtype=LINE_RECORD).tobytes()
        found.extend(reader.feed(table, part))
        records.clear()

    for number, text in enumerate(texts):
        records.append((number, len(text)))
        payload += text
        while len(payload) >= frame_bytes:
            send(payload[:frame_bytes])
            payload = payload[frame_bytes:]
    if payload or records:
        send(payload)
    assert reader.whole
    assert [line.number for line in found] == list(range(len(texts)))
    assert [line.custom_id for line in found] == [b'"%d"' % i for i in range(len(texts))]
    assert [orjson.loads(line.body)["t"] for line in found] == ["x" * size for size in sizes]


def test_records_that_do_not_fit_their_payload_are_refused() -> None:
    table = np.array([(0, 100), (1, 5)], dtype=LINE_RECORD).tobytes()
    with pytest.raises(ValueError, match="inside another"):
        LineReader().feed(table, b"x" * 10)
    with pytest.raises(ValueError, match="without a line"):
        LineReader().feed(b"", b"x")
