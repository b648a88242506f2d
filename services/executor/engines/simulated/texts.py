"""The texts that a simulated request is about: read as any engine would, and counted in words."""

from typing import Any

from services.executor.engines.bodies.bounds import BodyRefused
from services.kit.wire.endpoints import CHAT_COMPLETIONS, COMPLETIONS, RERANK, RESPONSES, SCORE

MAX_WORDS = 100_000
"""Context length in words; longer prompts and larger `max_tokens` are refused."""
SCORED_PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""The names that vLLM knows for the two sides of a score."""


def is_number(value: object) -> bool:
    """Whether JSON says that it is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Whether JSON says that it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def _message_text(message: object, param: str) -> str:
    if not isinstance(message, dict):
        raise BodyRefused(f"Invalid '{param}': expected a list of objects.", param)
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BodyRefused(f"Invalid '{param}': content must be text or a list of parts.", param)
    texts = []
    for part in content:
        text = part.get("text", "") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise BodyRefused(f"Invalid '{param}': a part's text must be a string.", param)
        texts.append(text)
    return "".join(texts)


def _prompts(value: object, param: str) -> list[str]:
    """Texts of a `prompt` or `input`; token ids stand for themselves, one word each."""
    if isinstance(value, str):
        return [value]
    if value is None or value == []:
        raise BodyRefused(f"Missing required parameter: '{param}'.", param)
    if isinstance(value, list):
        if all(is_whole(token) for token in value):
            return [" ".join(map(str, value))]
        if all(isinstance(text, str) for text in value):
            return value
        if all(isinstance(ids, list) and ids and all(map(is_whole, ids)) for ids in value):
            return [" ".join(map(str, ids)) for ids in value]
    raise BodyRefused(f"Invalid '{param}': expected text, token ids, or a list of either.", param)


def _names(endpoint: str, body: dict[str, Any]) -> tuple[str, str]:
    """The fields that hold what is compared: those the body has, else the usual ones."""
    if endpoint == RERANK:
        return "query", "documents"
    return next(
        (pair for pair in SCORED_PAIRS if all(body.get(name) is not None for name in pair)),
        SCORED_PAIRS[0],
    )


def _side(value: object, param: str) -> list[str]:
    """Texts of one side of a comparison, each a string or an object with content."""
    if value is None or value == []:
        raise BodyRefused(f"Missing required parameter: '{param}'.", param)
    items = value if isinstance(value, list) else [value]
    return [item if isinstance(item, str) else _message_text(item, param) for item in items]


def sides_of(endpoint: str, body: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What is compared with what: 1 with any number, or as many with as many.

    A rerank's query is always 1. Raises `BodyRefused`.
    """
    names = _names(endpoint, body)
    one, other = (_side(body.get(name), name) for name in names)
    if endpoint == RERANK and isinstance(body[names[0]], list):
        raise BodyRefused("Invalid 'query': expected one text.", "query")
    if len(one) not in (1, len(other)):
        raise BodyRefused(f"Invalid '{names[1]}': expected as many as '{names[0]}'.", names[1])
    return one, other


def texts_of(endpoint: str, body: dict[str, Any]) -> list[str]:
    """All texts of a request, in order. Raises `BodyRefused`, also where they are too long."""
    if endpoint in (CHAT_COMPLETIONS, RESPONSES):
        param = "messages" if endpoint == CHAT_COMPLETIONS else "input"
        messages = body.get(param)
        if endpoint == RESPONSES and isinstance(messages, str):
            messages = [{"content": messages}]
        if not isinstance(messages, list) or not messages:
            raise BodyRefused(f"Missing required parameter: '{param}'.", param)
        texts = [_message_text(message, param) for message in messages]
        words = sum(len(text.split()) for text in texts)
    elif endpoint in (SCORE, RERANK):
        one, other = sides_of(endpoint, body)
        param, texts = _names(endpoint, body)[1], one + other
        words = max(len(text.split()) for text in texts)
    else:
        param = "prompt" if endpoint == COMPLETIONS else "input"
        texts = _prompts(body.get(param), param)
        words = max(len(text.split()) for text in texts)
    if words > MAX_WORDS:
        raise BodyRefused(f"The prompt has {words} words; the limit is {MAX_WORDS}.", param)
    return texts
