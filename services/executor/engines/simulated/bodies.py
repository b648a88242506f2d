"""What the simulated engine's answers are made of: shapes of objects, and vectors."""

import math
import struct
from hashlib import sha256
from typing import Any

SCORE_DIMENSIONS = 8


def vector(text: str, dimensions: int) -> list[float]:
    """A unit vector made of the text's hash: equal texts, equal vectors."""
    raw = b""
    block = 0
    while len(raw) < 2 * dimensions:
        raw += sha256(block.to_bytes(4, "big") + text.encode()).digest()
        block += 1
    # Odd numerators: no component, hence no norm, is 0.
    values = [
        (2 * n + 1) / 65_536 - 1 for n in struct.unpack(f">{dimensions}H", raw[: 2 * dimensions])
    ]
    norm = math.sqrt(sum(value * value for value in values))
    return [value / norm for value in values]


def response_body(
    body: dict[str, Any], request_id: str, content: str, words: int, created: int
) -> dict[str, Any]:
    """A finished `response` object of the Responses API with one message.

    `body`: the request's. `words`: of its input. `created`: Unix seconds.
    """
    output_words = len(content.split())
    text = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": created,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": body["model"],
        "output": [
            {
                "id": f"msg_{request_id}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
        ],
        "parallel_tool_calls": True,
        "temperature": body.get("temperature"),
        "tool_choice": "auto",
        "tools": [],
        "top_p": body.get("top_p"),
        "usage": {
            "input_tokens": words,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": output_words,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": words + output_words,
        },
        "system_fingerprint": "simulated",
    }


def _likeness(one: str, other: str) -> float:
    """From -1 to 1, which only equal texts have."""
    pair = zip(vector(one, SCORE_DIMENSIONS), vector(other, SCORE_DIMENSIONS), strict=True)
    return math.fsum(a * b for a, b in pair)


def score_body(
    body: dict[str, Any], request_id: str, one: list[str], other: list[str], created: int
) -> dict[str, Any]:
    """A list of scores, one a pair; `one` may be a single text for all of `other`.

    `body`: the request's. `created`: Unix seconds. Usage is the caller's to add.
    """
    each = one * len(other) if len(one) == 1 else one
    scores = [_likeness(a, b) for a, b in zip(each, other, strict=True)]
    return {
        "id": f"score-{request_id}",
        "object": "list",
        "created": created,
        "model": body["model"],
        "data": [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ],
    }


def rerank_body(
    body: dict[str, Any], request_id: str, query: str, documents: list[str]
) -> dict[str, Any]:
    """The documents, most relevant first, at most `top_n` of the body's (0 and none: all).

    Equally relevant ones stay in order. Usage is the caller's to add.
    """
    results: list[dict[str, Any]] = [
        {"index": index, "document": {"text": text}, "relevance_score": _likeness(query, text)}
        for index, text in enumerate(documents)
    ]
    results.sort(key=lambda result: float(result["relevance_score"]), reverse=True)
    return {
        "id": f"score-{request_id}",
        "model": body["model"],
        "results": results[: body.get("top_n") or None],
    }
