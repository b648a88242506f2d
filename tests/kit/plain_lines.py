"""A plain, slow parser of batch inputs, and a plain, slow judge: what the fast ones must equal."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass
class Plain:
    """(offset, length, physical line, parsed value or name of the fault) of each request."""

    requests: list[tuple[int, int, int, Any]] = field(default_factory=list)


def strict(text: bytes) -> Any:
    """Python's own parser, made strict."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    def finite(number: str) -> float:
        value = float(number)
        if value in (float("inf"), float("-inf")):
            raise ValueError(number)
        return value

    decoded = text.decode("utf-8")
    value = json.loads(decoded, parse_constant=refuse, parse_float=finite)
    # Lone surrogates pass Python's parser as escapes; they cannot be encoded again.
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def plain(data: bytes, max_line_bytes: int) -> Plain:
    found = Plain()
    offset = 0
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, raw in enumerate(lines, start=1):
        bom = 3 if number == 1 and raw[:3] == b"\xef\xbb\xbf" else 0
        text = raw[bom:-1] if raw[bom:][-1:] == b"\r" else raw[bom:]
        if len(text) > max_line_bytes:
            found.requests.append((offset, len(raw), number, "too long"))
        elif text.decode(errors="replace").strip():
            try:
                value = strict(text)
            except UnicodeDecodeError:
                value = "not utf-8"
            except (ValueError, RecursionError):
                value = "not json"
            else:
                value = [value]
            found.requests.append((offset + bom, len(text), number, value))
        offset += len(raw) + 1
    return found


Fault = tuple[int, str, str | None]
"""Physical line, code, param."""

REQUIRED: Final[dict[str, list[tuple[str, ...]]]] = {
    "/v1/chat/completions": [("messages",)],
    "/v1/completions": [("prompt",)],
    "/v1/embeddings": [("input",)],
    "/v1/responses": [("input",)],
    "/v1/score": [
        ("text_1", "text_2"),
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
    ],
    "/v1/rerank": [("query", "documents")],
}
UNREADABLE: Final = {
    "too long": "line_too_long",
    "not utf-8": "invalid_json_line",
    "not json": "invalid_json_line",
}
MISSING: Final = "missing_required_parameter"


def judge(found: Plain, endpoint: str, served: dict[str, frozenset[str]]) -> list[Fault]:
    """Return all faults, written down from the contract's table, line by line.

    Args:
        found: the file's lines.
        endpoint: the batch's.
        served: the endpoints of each model.
    """
    objects = [value[0] for *_, value in found.requests if isinstance(value, list)]
    asked = [line["body"].get("model") for line in objects if _has_body(line)]
    model = next(
        (one for one in asked if isinstance(one, str) and endpoint in served.get(one, ())), None
    )
    seen: set[str] = set()
    faults: list[Fault] = []
    for _, _, number, value in found.requests:
        if isinstance(value, str):
            faults.append((number, UNREADABLE[value], None))
            continue
        line = value[0]
        if not isinstance(line, dict):
            faults.append((number, "invalid_request", None))
            continue
        custom_id = line.get("custom_id")
        if isinstance(custom_id, str) and custom_id:
            if custom_id in seen:
                faults.append((number, "duplicate_custom_id", "custom_id"))
            seen.add(custom_id)
        faults += ((number, code, param) for code, param in _of_line(line, endpoint))
        if _has_body(line):
            faults += (
                (number, code, param) for code, param in _of_model(line, endpoint, served, model)
            )
    return faults


def _has_body(line: Any) -> bool:
    return isinstance(line, dict) and isinstance(line.get("body"), dict)


def _of_line(line: dict[str, Any], endpoint: str) -> Iterator[tuple[str, str]]:
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if name not in line:
            yield MISSING, name
        elif not isinstance(line[name], kind):
            yield "invalid_request", name
    if line.get("custom_id") == "":
        yield "invalid_value", "custom_id"
    if isinstance(line.get("method"), str) and line["method"] != "POST":
        yield "invalid_value", "method"
    if isinstance(line.get("url"), str) and line["url"] != endpoint:
        yield "invalid_url", "url"
    if _has_body(line):
        ours = line.get("url") is None or line["url"] == endpoint
        if ours:
            yield from ((MISSING, f"body.{name}") for name in _lacking(line["body"], endpoint))
        if line["body"].get("stream") is True:
            yield "streaming_unsupported", "body.stream"


def _lacking(body: dict[str, Any], endpoint: str) -> list[str]:
    """The names missing of the fields' set of which the fewest are."""
    best: list[str] | None = None
    for names in REQUIRED[endpoint]:
        missing = [name for name in names if body.get(name) is None]
        if best is None or len(missing) < len(best):
            best = missing
    return best or []


def _of_model(
    line: dict[str, Any], endpoint: str, served: dict[str, frozenset[str]], model: str | None
) -> Iterator[tuple[str, str]]:
    asked = line["body"].get("model")
    if asked is None:
        yield MISSING, "body.model"
    elif not isinstance(asked, str):
        yield "invalid_request", "body.model"
    elif asked not in served:
        yield "model_not_found", "body.model"
    elif endpoint not in served[asked]:
        yield "invalid_value", "body.model"
    elif asked != model:
        yield "mismatched_model", "body.model"
