"""Each fault of the contract's table, found from the index and explained from the line."""

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.wire.endpoints import ENDPOINTS, RERANK, SCORE
from services.store.domain.index import line_index
from services.store.domain.index.body_fields import FIELD_FLAG
from services.store.domain.index.line_index import LineIndex
from services.store.domain.validation import validate
from services.store.domain.validation.explain import Expectation, explain_line
from services.store.domain.validation.validate import IndexMismatchError, Limits
from tests.kit.plain_lines import REQUIRED
from tests.unit.store.judged import CHAT, DROP, LIMITS, SERVED, check, faults_of, index_of, request

pytestmark = pytest.mark.unit


def test_a_sound_file() -> None:
    verdict, errors = check(
        b"\n" + request("1") + b"\r\n \n" + request("2", body={"stream": False}) + b"\n\n"
    )
    assert errors == []
    assert (verdict.lines, verdict.model, verdict.sound) == (2, "m", True)


@pytest.mark.parametrize(
    ("line", "code", "param", "says"),
    [
        (b'{"custom_id":"x"', "invalid_json_line", None, "not parseable as valid JSON."),
        (b'{"a":NaN}', "invalid_json_line", None, "NaN"),
        (b'{"a":-Infinity}', "invalid_json_line", None, "Infinity"),
        (b'{"a":1e999}', "invalid_json_line", None, "too large"),
        (b'{"a":"\\ud83d"}', "invalid_json_line", None, "half a character"),
        (b'{"a":"caf\xe9"}', "invalid_json_line", None, "not valid UTF-8: byte 0xe9"),
        (b"\xef\xbb\xbf{}", "invalid_json_line", None, "not parseable as valid JSON."),
        (b"[1]", "invalid_request", None, "an array"),
        (b"null", "invalid_request", None, "null"),
        (b'"x"', "invalid_request", None, "a string"),
        (b"true", "invalid_request", None, "a boolean"),
        (request(DROP), "missing_required_parameter", "custom_id", "parameter: 'custom_id'."),
        (request(1), "invalid_request", "custom_id", "a number"),
        (request(None), "invalid_request", "custom_id", "null"),
        (request(["x"]), "invalid_request", "custom_id", "an array"),
        (request(""), "invalid_value", "custom_id", "empty"),
        (request("x" * 513), "string_above_max_length", "custom_id", "512"),
        (request(method=DROP), "missing_required_parameter", "method", "'method'."),
        (request(method="GET"), "invalid_value", "method", "'GET'"),
        (request(method="post"), "invalid_value", "method", "'POST'"),
        (request(method=["POST"]), "invalid_request", "method", "an array"),
        (request(url=DROP), "missing_required_parameter", "url", "'url'."),
        (request(url=7), "invalid_request", "url", "a number"),
        (request(url="/chat/completions"), "invalid_url", "url", f"write '{CHAT}'"),
        (request(url=f"https://api.example.com{CHAT}"), "invalid_url", "url", "does not match"),
        (request(url=CHAT + "/"), "invalid_url", "url", "does not match"),
        (request(url="x" * 600), "invalid_url", "url", "…"),
        (request(url=CHAT + "\n"), "invalid_url", "url", f"It is '{CHAT}\\n';"),
        (request(method="POST\u200b"), "invalid_value", "method", "'POST\\u200b'"),
        (
            request(url="/v1/embeddings", body={"messages": DROP, "input": "x"}),
            "invalid_url",
            "url",
            "another endpoint",
        ),
        (request(body=DROP), "missing_required_parameter", "body", "'body'."),
        (request(body="x"), "invalid_request", "body", "an object, but got a string"),
        (request(body=[]), "invalid_request", "body", "an array"),
        (request(body={"model": DROP}), "missing_required_parameter", "body.model", "'model'."),
        (request(body={"model": None}), "missing_required_parameter", "body.model", "'model'."),
        (request(body={"model": 3}), "invalid_request", "body.model", "a number"),
        (
            request(body={"model": "nope"}),
            "model_not_found",
            "body.model",
            "'nope' is not supported by the Batch API. Models served here: 'e', 'm', 'm2'.",
        ),
        (request(body={"model": "x" * 600}), "model_not_found", "body.model", "not supported"),
        (
            request(body={"model": "e"}),
            "invalid_value",
            "body.model",
            f"'{CHAT}'. It serves: '/v1/embeddings', '{RERANK}', '/v1/responses', '{SCORE}'.",
        ),
        (request(body={"model": "m2"}), "mismatched_model", "body.model", "'m2' differs from 'm'"),
        (
            request(body={"messages": DROP}),
            "missing_required_parameter",
            "body.messages",
            "Missing required parameter: 'messages'.",
        ),
        (
            request(body={"messages": None}),
            "missing_required_parameter",
            "body.messages",
            "'messages'.",
        ),
        (
            request(body={"stream": True}),
            "streaming_unsupported",
            "body.stream",
            "Chat Completions: Streaming is not supported in the Batch API.",
        ),
        (b'{"x":"' + b"x" * 3000 + b'"}', "line_too_long", None, "at most 3000"),
        (
            request("first"),
            "duplicate_custom_id",
            "custom_id",
            "The custom_id 'first' is a duplicate of that of the request on line 1.",
        ),
        (
            request(method=DROP, **{" method": "POST"}),
            "missing_required_parameter",
            "method",
            "The key ' method' is near it: write 'method'.",
        ),
        (
            request(DROP, customId="x"),
            "missing_required_parameter",
            "custom_id",
            "The key 'customId' is near it",
        ),
        (
            request(body=DROP, params={"model": "m"}),
            "missing_required_parameter",
            "body",
            "The key 'params' is near it: write 'body'.",
        ),
    ],
)
def test_one_fault_on_line_3(line: bytes, code: str, param: str | None, says: str) -> None:
    _, errors = check(request("first") + b"\n\n" + line + b"\n" + request("last"))
    (error,) = errors
    assert (error.code, error.param, error.line) == (code, param, 3)
    assert says in error.message


def test_the_last_of_two_equal_keys_wins() -> None:
    good = request("b").replace(b'"method"', b'"method": 1, "method"', 1)
    bad = request("c").replace(b'"method": "POST"', b'"method": "POST", "method": 1', 1)
    assert faults_of(request(), good, bad) == [("invalid_request", "method", 3)]


def test_several_faults_stand_in_line_order() -> None:
    lines = [
        request(DROP),
        request("2", method=DROP),
        request("3", url=DROP),
        request("4", body=DROP),
        request(DROP, method="GET", body={"messages": DROP, "stream": True}),
        request("2"),
    ]
    assert faults_of(*lines) == [
        ("missing_required_parameter", "custom_id", 1),
        ("missing_required_parameter", "method", 2),
        ("missing_required_parameter", "url", 3),
        ("missing_required_parameter", "body", 4),
        ("missing_required_parameter", "custom_id", 5),
        ("invalid_value", "method", 5),
        ("missing_required_parameter", "body.messages", 5),
        ("streaming_unsupported", "body.stream", 5),
        ("duplicate_custom_id", "custom_id", 6),
    ]


def test_a_wrong_model_first_blames_no_other_line() -> None:
    lines = [request("1", body={"model": "nope"}), request("2"), request("3", body={"model": "m2"})]
    assert faults_of(*lines) == [
        ("model_not_found", "body.model", 1),
        ("mismatched_model", "body.model", 3),
    ]


def test_no_line_names_the_endpoint() -> None:
    """Names too long to be kept do not pass for the endpoint, nor for the model."""
    line = request(url="x" * 600, body={"model": "y" * 600})
    assert faults_of(line) == [("invalid_url", "url", 1), ("model_not_found", "body.model", 1)]


def test_what_is_checked_is_what_may_be_asked_for() -> None:
    assert tuple(FIELD_FLAG) == ENDPOINTS


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [(endpoint, fields) for endpoint in ENDPOINTS for fields in REQUIRED[endpoint]],
)
def test_every_endpoint(endpoint: str, fields: tuple[str, ...]) -> None:
    model = next(name for name, endpoints in SERVED.items() if endpoint in endpoints)
    body = {"model": model, "messages": DROP} | dict.fromkeys(fields, "hello")
    assert check(request(url=endpoint, body=body), endpoint)[1] == []
    for field in fields:
        for gone in (DROP, None):
            (error,) = check(request(url=endpoint, body=body | {field: gone}), endpoint)[1]
            # Queries are scored with documents or items; the former are named.
            named = "documents" if field == "items" else field
            assert (error.code, error.param) == ("missing_required_parameter", f"body.{named}")


@pytest.mark.parametrize(
    ("endpoint", "body", "missing"),
    [
        (SCORE, {}, ["text_1", "text_2"]),
        (SCORE, {"text_1": "x"}, ["text_2"]),
        (SCORE, {"data_2": "x"}, ["data_1"]),
        (SCORE, {"text_1": "x", "data_2": "x"}, ["text_2"]),
        (SCORE, {"text_1": "x", "queries": "x", "items": []}, []),
        (RERANK, {}, ["query", "documents"]),
        (RERANK, {"query": "x", "text_2": "x"}, ["documents"]),
    ],
)
def test_what_is_missing_of_scored_lines(endpoint: str, body: Any, missing: list[str]) -> None:
    line = request(url=endpoint, body={"model": "e", "messages": DROP, **body})
    found = [(error.code, error.param) for error in check(line, endpoint)[1]]
    assert found == [("missing_required_parameter", f"body.{name}") for name in missing]


def test_an_endpoint_unknown_here_is_a_callers_mistake() -> None:
    with pytest.raises(KeyError):
        check(request(), "/v1/bogus")


def test_no_lines() -> None:
    assert faults_of(b"", b" ") == [("empty_file", None, None)]


@pytest.mark.parametrize(("lines", "refused"), [(200, False), (201, True), (500, True)])
def test_too_many_lines(lines: int, refused: bool) -> None:
    _, errors = check(b"\n".join(request(str(n)) for n in range(lines)))
    if not refused:
        assert errors == []
        return
    (error,) = errors
    assert (error.code, error.param, error.line) == ("too_many_tasks", None, None)
    assert f"{lines} requests" in error.message
    assert "at most 200" in error.message


def test_a_lower_limit_than_the_indexs() -> None:
    index = index_of(b"\n".join(request(str(n)) for n in range(20)))
    verdict = validate.check_input(
        index, endpoint=CHAT, served_models=SERVED, limits=Limits(max_batch_lines=10)
    )
    assert verdict.file_fault is not None
    assert "at most 10." in verdict.file_fault.message


@pytest.mark.parametrize(("faulty", "more"), [(99, 0), (100, 0), (101, 1), (150, 50)])
def test_the_list_ends_with_how_many_more(faulty: int, more: int) -> None:
    _, errors = check(b"\n".join([request("ok"), *[b"x"] * faulty]))
    assert [e.line for e in errors[:100]] == list(range(2, 2 + min(faulty, 100)))
    if more:
        assert (errors[-1].code, errors[-1].line) == ("more_errors", None)
        assert errors[-1].message.startswith(f"{more} more line")
    assert len(errors) == min(faulty, 100) + bool(more)


def test_equal_hashes_of_different_ids_are_no_duplicates() -> None:
    data = b"\n".join([request("a"), request("b"), request("b"), request("a"), request("c")])
    index = index_of(data)
    records = index.records.copy()
    records["hash"] = 7
    collided = LineIndex(
        index.lines, True, index.shape, index.urls, index.models, records, index.breaks
    )

    def read_line(ordinal: int) -> bytes:
        offset, length = index.span(ordinal)
        return data[offset : offset + length]

    def run(subset: LineIndex) -> list[tuple[int | None, str]]:
        errors = validate.faults(
            subset, read_line, endpoint=CHAT, served_models=SERVED, limits=LIMITS
        )
        return [(e.line, e.message) for e in errors]

    found = run(collided)
    assert [line for line, _ in found] == [3, 4]
    assert "line 2." in found[0][1]
    assert "line 1." in found[1][1]
    two = LineIndex(2, True, index.shape, index.urls, index.models, records[:2], index.breaks)
    assert run(two) == []


def test_an_index_of_another_file_is_noticed() -> None:
    index = index_of(request(method="GET"))
    with pytest.raises(IndexMismatchError):
        validate.faults(
            index, lambda _: request(), endpoint=CHAT, served_models=SERVED, limits=LIMITS
        )


values = st.sampled_from(
    [DROP, None, True, False, "", 1, "x", "m", "m2", "e", CHAT, "POST", [], {}]
)


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "custom_id": values | st.sampled_from("abc"),
                "method": values,
                "url": values,
                "whole": values,
                "model": values,
                "messages": values,
                "stream": values,
            },
        ),
        min_size=1,
        max_size=6,
    )
)
def test_index_and_explanation_agree(changes: list[dict[str, Any]]) -> None:
    """A line is at fault by its 24 bytes exactly when its explanation finds a fault."""
    lines = []
    for number, change in enumerate(changes):
        body: Any = {k: change[k] for k in ("model", "messages", "stream") if k in change}
        if "whole" in change and change["whole"] is not None:
            body = change["whole"]
        top = {k: change[k] for k in ("method", "url") if k in change}
        lines.append(request(change.get("custom_id", str(number)), body=body, **top))
    verdict, _ = check(b"\n".join(lines))
    expectation = Expectation(endpoint=CHAT, served_models=SERVED, file_model=verdict.model)
    explained = [
        number
        for number, line in enumerate(lines)
        if explain_line(line, line=number + 1, expectation=expectation)
    ]
    assert verdict.at_fault.tolist() == explained
    ids = [json.loads(line).get("custom_id") for line in lines]
    known = [(n, i) for n, i in enumerate(ids) if isinstance(i, str) and i]
    assert verdict.repeats.tolist() == [n for n, i in known if i in ids[:n]]
    assert verdict.originals.tolist() == [ids.index(i) for n, i in known if i in ids[:n]]


def test_a_million_lines_take_well_under_a_second() -> None:
    count = 1_000_000
    records = np.zeros(count, line_index.RECORD)
    records["hash"] = np.random.default_rng(1).permutation(count).astype(np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    records["flags"] = index_of(request()).records["flags"][0]
    records["flags"][5] = 0
    records["hash"][9] = records["hash"][7]
    sample = index_of(request())
    index = LineIndex(count, True, sample.shape, sample.urls, sample.models, records, sample.breaks)
    started = time.process_time()
    verdict = validate.check_input(
        index, endpoint=CHAT, served_models=SERVED, limits=Limits(max_batch_lines=count)
    )
    taken = time.process_time() - started
    assert verdict.at_fault.tolist() == [5]
    assert (verdict.repeats.tolist(), verdict.originals.tolist()) == ([9], [7])
    assert taken < 1.0
