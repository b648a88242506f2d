"""What a body may hold: bounds that keep reading and judging it short, whatever its bytes.

An engine's loop also beats. A body is counted before it is parsed, and what an engine would look at
one by one, in each of the ways that it may be meant, is counted before the engine sees it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
import orjson

from services.executor.engines.base import EngineRequest, EngineResponse, refusal
from services.executor.engines.bodies.fields import refused_field
from services.kit.wire.endpoints import CHAT_COMPLETIONS, RERANK, RESPONSES, SCORE
from services.kit.wire.values import MOST_NUMBERS, MOST_VALUES, too_many_values

MOST_ELEMENTS: Final = 2_048
"""Entries of each array of a body, such as messages, tools, inputs or documents, numbers apart; of
the arrays inside of messages, such as content parts, together; and of each map, such as
`logit_bias`."""
MOST_CHOICES: Final = 128
"""Answers to one prompt: `n`, which is also how many beams a search has."""
MOST_ALTERNATIVES: Final = 4_096
"""Entries of arrays, and properties, in all that a line's grammars are made of."""
MOST_GRAMMAR_CHARACTERS: Final = 131_072
"""Characters of the alternatives, constants, patterns and grammars that are given as text."""
MOST_ITEMS: Final = 100_000
"""Items of all arrays that a body's grammars count: an engine may take 1 KiB for each of them, so
that one schema of a few bytes took all memory there was (measured, with llguidance)."""

_GRAMMARS: Final = ("response_format", "structured_outputs", "text", "tools")
_COUNTS: Final = ("minItems", "maxItems")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions")
_GRAMMAR_TEXTS: Final = ("choice", "const", "enum", "grammar", "pattern", "regex")
_CONVERSATIONS: Final = ("messages", "input")
_MAPS: Final = ("logit_bias", "metadata")
_NUMBERS: Final = (int, float)


class BodyRefused(Exception):
    """The body asks for what is not to be done; carries the 400 to answer."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.response: EngineResponse = refusal(message, param=param)


def bounded_body(request: EngineRequest) -> dict[str, Any]:
    """The body of a request, within all bounds.

    Raises `BodyRefused`.
    """
    _refuse_many_values(None, request.body)
    try:
        body = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        # The store has seen that it is JSON; what is left is mostly a cut emoji (a lone
        # surrogate), which other parsers let through to a tokenizer that then fails on it.
        raise BodyRefused(f"The body is not valid JSON text: {error}.") from None
    if not isinstance(body, dict):
        raise BodyRefused("The body must be a JSON object.")
    refused = refused_field(request.endpoint, body)
    if refused is not None:
        raise BodyRefused(f"'{refused}' is not supported in batches: leave it out.", refused)
    _refuse_many_elements(body)
    _refuse_vast_grammars(body)
    _refuse_many_choices(body)
    return body


def _refuse_many_values(param: str | None, *texts: bytes) -> None:
    if too_many_values(*texts):
        what = "The body" if param is None else f"Invalid '{param}': JSON given as text"
        raise BodyRefused(
            f"{what} may have {MOST_VALUES} values (entries of arrays and objects) and "
            f"{MOST_NUMBERS} numbers in arrays; split the request.",
            param,
        )


def _refuse_many_elements(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if isinstance(value, list):
            _bound(name, _elements(value), "entries")
        elif name in _MAPS and isinstance(value, dict):
            _bound(name, len(value), "entries")
    for name in _CONVERSATIONS:
        value = body.get(name)
        if isinstance(value, list):
            _refuse_long_conversation(name, value)


def _refuse_long_conversation(name: str, messages: list[Any]) -> None:
    """Of the arrays inside of messages, and of what a call's arguments hold as text."""
    parts = 0
    arguments: list[bytes] = []
    for item in _containers(messages):
        if isinstance(item, list):
            parts += _elements(item)
        elif isinstance(item.get("arguments"), str):
            # Templates want them parsed, and so an engine parses them.
            arguments.append(item["arguments"].encode())
    _bound(name, parts - _elements(messages), "content parts and other entries of inner arrays")
    _refuse_many_values(name, *arguments)


def _bound(name: str, count: int, what: str) -> None:
    if count > MOST_ELEMENTS:
        raise BodyRefused(
            f"Invalid '{name}': it has {count} {what}; the limit is {MOST_ELEMENTS}.", name
        )


def _elements(values: list[Any]) -> int:
    """Entries of an array, but for token ids, which cost little."""
    if len(values) <= MOST_ELEMENTS and not (values and type(values[0]) in _NUMBERS):
        return len(values)
    return sum(type(value) not in _NUMBERS for value in values)


def _containers(value: object) -> Iterator[Any]:
    """All arrays and objects in a value, itself included."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield item
            pending.extend(inner for inner in item.values() if isinstance(inner, (dict, list)))
        elif isinstance(item, list):
            yield item
            pending.extend(inner for inner in item if isinstance(inner, (dict, list)))


def _refuse_many_choices(body: Mapping[str, Any]) -> None:
    choices = body.get("n")
    if choices is None:
        return
    if type(choices) is not int or not 1 <= choices <= MOST_CHOICES:
        raise BodyRefused(f"Invalid 'n': expected a whole number from 1 to {MOST_CHOICES}.", "n")
    prompts = body.get("prompt")
    if isinstance(prompts, list) and choices * _elements(prompts) > MOST_ELEMENTS:
        raise BodyRefused(
            f"Invalid 'n': {choices} answers to each of {_elements(prompts)} prompts; "
            f"{MOST_ELEMENTS} are the limit in all.",
            "n",
        )


# --- grammars -------------------------------------------------------------------------------------


class _Grammar:
    """Counts what all grammars of a body are made of."""

    def __init__(self) -> None:
        self.items = 0.0
        self.alternatives = 0
        self.characters = 0

    def count(self, name: str, value: object) -> None:
        """Count a field; raises `BodyRefused` at the first bound that is passed."""
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                pending.extend(_schema_in(item, name))
            elif isinstance(item, list):
                self._add_alternatives(name, len(item))
                pending.extend(item)
            elif isinstance(item, dict):
                self._count_object(name, item)
                pending.extend(item.values())

    def _count_object(self, name: str, schema: dict[str, Any]) -> None:
        for counted in _COUNTS:
            items = schema.get(counted)
            if isinstance(items, _NUMBERS):
                self.items += max(0, items)
                if self.items > MOST_ITEMS:
                    raise BodyRefused(
                        f"Invalid '{name}': its arrays may have {MOST_ITEMS} items in all; lower "
                        f"'{counted}'.",
                        name,
                    )
        for key in _NAMED:
            properties = schema.get(key)
            if isinstance(properties, dict):
                self._add_alternatives(name, len(properties))
                self._add_characters(name, properties)
        for key in _GRAMMAR_TEXTS:
            given = schema.get(key)
            texts = given if isinstance(given, list) else [given]
            self._add_characters(name, (text for text in texts if isinstance(text, str)))
            if key in ("grammar", "pattern", "regex") and isinstance(given, str):
                self._add_alternatives(name, given.count("|"))

    def _add_alternatives(self, name: str, count: int) -> None:
        self.alternatives += count
        if self.alternatives > MOST_ALTERNATIVES:
            raise BodyRefused(
                f"Invalid '{name}': a request's schemas, tools and grammars may have "
                f"{MOST_ALTERNATIVES} alternatives and properties in all.",
                name,
            )

    def _add_characters(self, name: str, texts: Any) -> None:
        self.characters += sum(len(text) for text in texts)
        if self.characters > MOST_GRAMMAR_CHARACTERS:
            raise BodyRefused(
                f"Invalid '{name}': the alternatives, names and patterns of a request's schemas, "
                f"tools and grammars may have {MOST_GRAMMAR_CHARACTERS} characters in all.",
                name,
            )


def _refuse_vast_grammars(body: Mapping[str, Any]) -> None:
    grammar = _Grammar()
    for name in _GRAMMARS:
        value = body.get(name)
        # How many tools there may be is bounded already.
        for one in value if name == "tools" and isinstance(value, list) else [value]:
            grammar.count(name, one)


def _schema_in(text: str, name: str) -> list[Any]:
    """The schema that is given as text, if it is one."""
    if text.lstrip()[:1] not in ("{", "["):
        return []
    raw = text.encode()
    _refuse_many_values(name, raw)
    try:
        return [orjson.loads(raw)]
    except orjson.JSONDecodeError:
        return []


# --- seats ----------------------------------------------------------------------------------------


class _Shape(msgspec.Struct, gc=False):
    """What says how many sequences a body is, all of it unread."""

    n: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    documents: msgspec.Raw = msgspec.Raw(b"")
    items: msgspec.Raw = msgspec.Raw(b"")
    text_1: msgspec.Raw = msgspec.Raw(b"")
    text_2: msgspec.Raw = msgspec.Raw(b"")
    queries: msgspec.Raw = msgspec.Raw(b"")
    data_1: msgspec.Raw = msgspec.Raw(b"")
    data_2: msgspec.Raw = msgspec.Raw(b"")


_shape_of: Final = msgspec.json.Decoder(_Shape).decode
_entries_of: Final[Callable[[bytes], list[msgspec.Raw]]] = msgspec.json.Decoder(
    list[msgspec.Raw]
).decode


def sequences_in(endpoint: str, body: bytes) -> int:
    """How many sequences an engine runs at once for a body: each takes a seat.

    1 for what an engine refuses.
    """
    conversation = endpoint in (CHAT_COMPLETIONS, RESPONSES)
    if conversation and b'"n"' not in body and b"\\u006" not in body:
        return 1
    if too_many_values(body):
        return 1
    try:
        shape = _shape_of(body)
        choices = int(bytes(shape.n)) if bytes(shape.n).isdigit() else 1
        if conversation:
            inputs = 1
        elif endpoint in (SCORE, RERANK):
            sides = (shape.text_1, shape.text_2, shape.data_1, shape.data_2, shape.queries)
            inputs = max(map(_inputs, (*sides, shape.documents, shape.items)))
        else:
            inputs = max(_inputs(shape.prompt), _inputs(shape.input))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return 1
    count = choices * inputs
    return count if 1 <= count <= MOST_CHOICES * MOST_ELEMENTS else 1


def _inputs(value: msgspec.Raw) -> int:
    """Texts, or arrays of token ids, of a field; 1 for a single one."""
    text = bytes(value)
    start = text[1:].lstrip()[:1]
    if not text.startswith(b"[") or start.isdigit() or start == b"-":
        return 1
    return len(_entries_of(text))
