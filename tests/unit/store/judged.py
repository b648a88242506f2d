"""Inputs made of single lines, and what is found wrong with them."""

import json
from typing import Any

from services.kit.wire.endpoints import RERANK, SCORE
from services.store.domain.index.line_index import LineIndex, LineIndexer
from services.store.domain.validation import validate
from services.store.domain.validation.explain import BatchError
from services.store.domain.validation.validate import Limits, Verdict

CHAT = "/v1/chat/completions"
SERVED = {
    "m": frozenset({CHAT, "/v1/completions"}),
    "m2": frozenset({CHAT}),
    "e": frozenset({"/v1/embeddings", "/v1/responses", SCORE, RERANK}),
}
LIMITS = Limits(max_batch_lines=200, max_reported_errors=100, max_line_bytes=3000)
DROP = object()


def request(custom_id: Any = "a", *, body: Any = None, **changes: Any) -> bytes:
    """A sound chat line with changes; DROP removes a key, `body` changes keys of the body."""
    full: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    if isinstance(body, dict):
        full = {k: v for k, v in (full | body).items() if v is not DROP}
    elif body is not None:
        changes["body"] = body
    line = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": full} | changes
    return json.dumps({k: v for k, v in line.items() if v is not DROP}).encode()


def index_of(data: bytes) -> LineIndex:
    indexer = LineIndexer(max_lines=200, max_line_bytes=3000, key=b"k")
    indexer.feed(data)
    return indexer.finish()


def check(data: bytes, endpoint: str = CHAT) -> tuple[Verdict, list[BatchError]]:
    index = index_of(data)

    def read_line(ordinal: int) -> bytes:
        offset, length = index.span(ordinal)
        return data[offset : offset + length]

    verdict = validate.check_input(index, endpoint=endpoint, served_models=SERVED, limits=LIMITS)
    errors = validate.faults(
        index,
        read_line,
        endpoint=endpoint,
        served_models=SERVED,
        limits=LIMITS,
        verdict=verdict,
    )
    assert verdict.sound == (not errors)
    return verdict, errors


def faults_of(*lines: bytes) -> list[tuple[str, str | None, int | None]]:
    return [(e.code, e.param, e.line) for e in check(b"\n".join(lines))[1]]
