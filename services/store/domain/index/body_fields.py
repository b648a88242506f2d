"""What a line's body cannot do without, by endpoint: as a flag of the index, and by name."""

from collections.abc import Mapping
from typing import Any, Final

from services.kit.wire.endpoints import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    EMBEDDINGS,
    RERANK,
    RESPONSES,
    SCORE,
)

HAS_MESSAGES: Final = 1 << 6
HAS_PROMPT: Final = 1 << 7
HAS_INPUT: Final = 1 << 8
HAS_PAIR: Final = 1 << 13
"""Two sides to score, by one of the names that vLLM has for them."""
HAS_QUERY: Final = 1 << 14
"""A query and the documents to rank by it."""

FIELD_FLAG: Final = {
    CHAT_COMPLETIONS: HAS_MESSAGES,
    COMPLETIONS: HAS_PROMPT,
    EMBEDDINGS: HAS_INPUT,
    RESPONSES: HAS_INPUT,
    SCORE: HAS_PAIR,
    RERANK: HAS_QUERY,
}
"""By endpoint, the flag that a sound line's body has."""

REQUIRED_FIELDS: Final[Mapping[int, tuple[tuple[str, ...], ...]]] = {
    HAS_MESSAGES: (("messages",),),
    HAS_PROMPT: (("prompt",),),
    HAS_INPUT: (("input",),),
    HAS_PAIR: (
        ("text_1", "text_2"),
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
    ),
    HAS_QUERY: (("query", "documents"),),
}
"""By flag, the sets of fields of which a body must have one whole; the first is the usual one."""

SCORING_FIELDS: Final = frozenset(
    name for flag in (HAS_PAIR, HAS_QUERY) for names in REQUIRED_FIELDS[flag] for name in names
)
"""A body without any of these needs no `scoring_flags`."""


def scoring_flags(body: Mapping[str, Any]) -> int:
    """`HAS_PAIR` and `HAS_QUERY`, as they hold."""
    flags = (HAS_PAIR, HAS_QUERY)
    return sum(flag for flag in flags if not _lacking(REQUIRED_FIELDS[flag], body))


def missing_fields(endpoint: str, body: Mapping[str, Any]) -> tuple[str, ...]:
    """What a body for `endpoint` lacks, of the set of fields that it has begun; empty if nothing.

    Raises KeyError for an endpoint that no batch may name.
    """
    return _lacking(REQUIRED_FIELDS[FIELD_FLAG[endpoint]], body)


def _lacking(choices: tuple[tuple[str, ...], ...], body: Mapping[str, Any]) -> tuple[str, ...]:
    lacks = [tuple(name for name in names if body.get(name) is None) for names in choices]
    # Of sets as nearly whole, the first.
    return min(lacks, key=len)
