"""The index says of any bytes, cut anywhere, what a plain parser says of the whole."""

import functools
import itertools
import json
import tracemalloc
from typing import Any
from unittest import mock

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.kit.wire.values import too_many_values
from services.store.domain.index import body_fields, line_index, names
from services.store.domain.index.body_shape import Shape, refusal
from services.store.domain.index.line_index import ANOTHER, IndexFormatError, LineIndex, LineIndexer
from tests.kit.jsonl_files import CHAT, MAX_LINE, files
from tests.kit.plain_lines import REQUIRED, plain

pytestmark = pytest.mark.unit

KEY = b"a key of the tests"
MAX_LINES = 12


def request(custom_id: str = "a", **changes: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "é"}]}
    line = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changes
    return json.dumps(line, ensure_ascii=False).encode()


def index_of(*feeds: bytes, max_lines: int = MAX_LINES, max_line_bytes: int = 10_000) -> LineIndex:
    indexer = LineIndexer(max_lines=max_lines, max_line_bytes=max_line_bytes, key=KEY)
    for data in feeds:
        indexer.feed(data)
    return indexer.finish()


# --- the plain parser ----------------------------------------------------------------------------


def has(body: dict[str, Any] | None, *names: str) -> bool:
    return body is not None and all(body.get(name) is not None for name in names)


def plain_flags(value: Any) -> int:
    faults = {
        "too long": line_index.TOO_LONG,
        "not utf-8": line_index.NOT_UTF8,
        "not json": line_index.NOT_JSON,
    }
    if isinstance(value, str):
        return faults[value]
    (line,) = value
    if not isinstance(line, dict):
        return 0
    body = line.get("body") if isinstance(line.get("body"), dict) else None
    custom_id = line.get("custom_id")
    facts = {
        line_index.OBJECT: True,
        line_index.CUSTOM_ID_OK: isinstance(custom_id, str) and 1 <= len(custom_id) <= 512,
        line_index.METHOD_POST: line.get("method") == "POST",
        line_index.URL_STRING: isinstance(line.get("url"), str),
        line_index.BODY_OBJECT: body is not None,
        line_index.MODEL_STRING: body is not None and isinstance(body.get("model"), str),
        body_fields.HAS_MESSAGES: has(body, "messages"),
        body_fields.HAS_PROMPT: has(body, "prompt"),
        body_fields.HAS_INPUT: has(body, "input"),
        body_fields.HAS_PAIR: any(has(body, *pair) for pair in REQUIRED["/v1/score"]),
        body_fields.HAS_QUERY: has(body, "query", "documents"),
        line_index.STREAM: body is not None and body.get("stream") is True,
    }
    return sum(flag for flag, holds in facts.items() if holds)


def assert_equals_plain(index: LineIndex, data: bytes, max_line_bytes: int) -> None:
    requests = plain(data, max_line_bytes).requests
    assert index.lines == len(requests)
    kept = requests[: MAX_LINES + 1]
    assert len(index.records) == len(kept)
    assert index.truncated == (len(kept) < len(requests))
    ids: dict[int, str] = {}
    for ordinal, (offset, length, number, value) in enumerate(kept):
        record = index.records[ordinal]
        assert index.span(ordinal) == (offset, length)
        assert int(index.offsets()[ordinal]) == offset
        assert index.physical_line(ordinal) == number
        flags = int(record["flags"])
        assert flags == plain_flags(value)
        line = value[0] if isinstance(value, list) and isinstance(value[0], dict) else {}
        assert name_of(index.urls, record["url"]) == (
            line["url"] if flags & line_index.URL_STRING else None
        )
        assert name_of(index.models, record["model"]) == (
            line["body"]["model"] if flags & line_index.MODEL_STRING else None
        )
        if flags & line_index.CUSTOM_ID_OK:
            assert ids.setdefault(int(record["hash"]), line["custom_id"]) == line["custom_id"]
    assert len(ids) == len(set(ids.values()))
    assert index.any_object == any(
        isinstance(value, list) and isinstance(value[0], dict) for *_, value in requests
    )


def name_of(names: tuple[str, ...], number: int) -> str | None:
    return None if number == ANOTHER else names[number]


# --- any bytes -----------------------------------------------------------------------------------


@given(files | st.binary(max_size=60), st.lists(st.integers(0, 400), max_size=6))
@example(b"\xef\xbb\xbf" + b" " * MAX_LINE + b"\r\n{}", [1, 2, 3])
@example(b"\xef\xbb\xbf" + b"x" * (MAX_LINE + 1) + b"\r\n{}", [2, 125])
@example(b"", [])
@example(b"\n" * 30 + b"{}", [])
def test_any_bytes_cut_anywhere(data: bytes, cuts: list[int]) -> None:
    whole = index_of(data, max_line_bytes=MAX_LINE)
    assert_equals_plain(whole, data, MAX_LINE)
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    cut = index_of(*pieces, max_line_bytes=MAX_LINE)
    assert cut.to_bytes() == whole.to_bytes()
    single = index_of(*(data[i : i + 1] for i in range(len(data))), max_line_bytes=MAX_LINE)
    assert single.to_bytes() == whole.to_bytes()


@given(files)
def test_bytes_and_back(data: bytes) -> None:
    index = index_of(data)
    stored = index.to_bytes()
    again = LineIndex.from_bytes(stored)
    assert again.to_bytes() == stored
    assert (again.lines, again.any_object, again.shape) == (
        index.lines,
        index.any_object,
        index.shape,
    )
    assert np.array_equal(again.records, index.records)
    assert not again.records.flags.owndata


@pytest.mark.parametrize("damage", [b"", b"NSLINES\x02", b"NSLINES\x01" + bytes(7)])
def test_foreign_bytes_are_refused(damage: bytes) -> None:
    with pytest.raises(IndexFormatError):
        LineIndex.from_bytes(damage)


def test_a_cut_index_is_refused() -> None:
    stored = index_of(request() + b"\n\n" + request("b")).to_bytes()
    assert LineIndex.from_bytes(stored).lines == 2
    for end in (len(stored) - 1, 30, 12):
        with pytest.raises(IndexFormatError):
            LineIndex.from_bytes(stored[:end])


# --- limits --------------------------------------------------------------------------------------


def test_records_stop_but_counting_goes_on() -> None:
    index = index_of(*[request(str(i)) + b"\n\n" for i in range(100)], max_lines=10)
    assert (index.lines, len(index.records), index.truncated) == (100, 11, True)
    assert len(index.breaks) == 10


def test_an_object_beyond_the_records_counts_as_one() -> None:
    index = index_of(b"x\n" * 20 + request(), max_lines=3)
    assert (index.lines, index.any_object) == (21, True)


def test_an_endless_line_takes_no_memory() -> None:
    indexer = LineIndexer(max_lines=5, max_line_bytes=1000, key=KEY)
    for _ in range(5000):
        indexer.feed(b"x" * 1000)
        assert len(indexer._open) <= 2100
    indexer.feed(b"\n" + request())
    index = indexer.finish()
    assert index.records["flags"][0] == line_index.TOO_LONG
    assert index.span(1) == (5_000_001, len(request()))


def test_many_and_long_names_are_another() -> None:
    lines = [request(str(i), url=f"{i:0500}") for i in range(3000)]
    lines.append(request("long", url="x" * 513))
    index = index_of(b"\n".join(lines), max_lines=4000)
    assert len(index.urls) == names.MAX_NAMES_BYTES // 500
    assert index.records["url"][len(index.urls)] == ANOTHER
    assert index.records["url"][-1] == ANOTHER
    assert all(index.records["flags"] & line_index.URL_STRING)


def test_names_beyond_the_records_are_none_of_the_files() -> None:
    index = index_of(b"x\n" * 20 + request(), max_lines=3)
    assert index.any_object
    assert (index.urls, index.models) == ((), ())


def test_the_hash_is_keyed() -> None:
    hashes = []
    for key in (b"one", b"two"):
        indexer = LineIndexer(max_lines=5, max_line_bytes=1000, key=key)
        indexer.feed(request("same"))
        hashes.append(int(indexer.finish().records["hash"][0]))
    assert hashes[0] != hashes[1]


def test_escaped_and_raw_ids_are_equal() -> None:
    index = index_of(b'{"custom_id":"\\u0061"}\n{"custom_id":"a"}\n{"custom_id":"A"}')
    first, second, third = index.records["hash"].tolist()
    assert first == second != third


def test_depth_is_bounded() -> None:
    deep = b'{"a":' * 1000 + b"1" + b"}" * 1000
    too_deep = b"[" * 10_000 + b"]" * 10_000
    index = index_of(deep + b"\n" + too_deep, max_line_bytes=1_000_000)
    assert index.records["flags"].tolist() == [line_index.OBJECT, line_index.NOT_JSON]


def test_a_line_of_many_values_takes_no_memory() -> None:
    """Parsed, it would take 25 times its size."""
    size = 4 * 1024 * 1024
    line = b'{"body":{"a":[' + b"{}," * (size // 3) + b"{}]}}"
    tracemalloc.start()
    try:
        index = index_of(line[:-10], line[-10:] + b"\n" + request(), max_line_bytes=2 * size)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert index.records["flags"][0] == line_index.TOO_MANY
    assert index.records["flags"][1] & line_index.OBJECT
    assert peak < 4 * size


@settings(max_examples=40)
@given(
    st.recursive(
        st.sampled_from([1, 'a"']),
        lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.sampled_from("ab"), inner),
    )
)
def test_only_a_line_of_many_values_is_judged_otherwise(value: Any) -> None:
    data = json.dumps({"custom_id": "a", "body": {"x": value}}).encode()
    before = index_of(data)
    few = functools.partial(too_many_values, most_values=12, most_numbers=6)
    with (
        mock.patch.object(line_index, "MOST_VALUES", 12),
        mock.patch.object(line_index, "too_many_values", few),
    ):
        after = index_of(data)
    if few(data):
        assert after.records["flags"].tolist() == [line_index.TOO_MANY]
        assert after.span(0) == before.span(0)
    else:
        assert after.to_bytes() == before.to_bytes()


def test_nothing_is_fed_after_the_end() -> None:
    indexer = LineIndexer(max_lines=5, max_line_bytes=1000, key=KEY)
    indexer.feed(request())
    assert indexer.finish() is indexer.finish()
    with pytest.raises(ValueError, match="finished"):
        indexer.feed(b"\n")


# --- files of the awkward kinds ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "shape", "says"),
    [
        (b"", Shape.EMPTY, "one request"),
        (b"\n \r\n\t\n", Shape.EMPTY, "one request"),
        (b"\xef\xbb\xbf", Shape.EMPTY, "one request"),
        (b"\x1f\x8b\x08\x00" + bytes(range(256)), Shape.GZIP, "gzip"),
        (b"PK\x03\x04" + bytes(range(256)), Shape.ZIP, "ZIP"),
        (json.dumps([{"a": 1}], indent=2).encode(), Shape.ARRAY, "array"),
        (b'[{"a":1},{"a":2}]', Shape.ARRAY, "array"),
        (json.dumps({"a": [1]}, indent=2).encode(), Shape.PRETTY, "several lines"),
        (request() + b"\r" + request("b") + b"\r", Shape.LONE_CR, "carriage return"),
        ((request() + b"\r") * 2000, Shape.LONE_CR, "carriage return"),
        (b"PAR1\0\r1,\r2", Shape.LINES, "one JSON object per line"),
        (b"custom_id,prompt\n1,hello\n", Shape.CSV, "CSV"),
        (request().decode().encode("utf-16"), Shape.UTF16, "UTF-16"),
        (b'{"a":1}\n'.decode().encode("utf-16-le"), Shape.UTF16, "UTF-16"),
        (b'{"a":1}\n'.decode().encode("utf-16-be"), Shape.UTF16, "UTF-16"),
        (b'{"a":"\xe9"}\n"\xe8"\n', Shape.NOT_UTF8, "UTF-8"),
        (b"hello\n", Shape.LINES, "one JSON object per line"),
        (b'{"a":NaN}', Shape.LINES, "one JSON object per line"),
    ],
)
def test_a_file_without_an_object_is_named(data: bytes, shape: Shape, says: str) -> None:
    index = index_of(data)
    assert not index.any_object
    assert index.shape == shape
    message = refusal(index.shape)
    assert says in message
    encoding = shape in (Shape.UTF16, Shape.NOT_UTF8)
    assert message.startswith(
        "Invalid file for Batch API. Must be utf-8 encoded"
        if encoding
        else "Invalid file format for Batch API. Must be .jsonl"
    )


def test_one_latin1_line_does_not_spoil_the_file() -> None:
    index = index_of(request() + b'\n{"a":"caf\xe9"}\n' + request("c"))
    assert index.any_object
    assert index.records["flags"].tolist()[1] == line_index.NOT_UTF8


def test_u2028_ends_no_line() -> None:
    line = request("r2\u2028x")
    index = index_of(line)
    assert index.lines == 1
    assert index.span(0) == (0, len(line))
    assert orjson.loads(line)["custom_id"] == "r2\u2028x"
