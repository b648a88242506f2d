"""Prompts for a real model: varied, about 90 tokens each with SmolLM2's chat template."""

import json
from collections.abc import Iterable
from typing import Any, Final

MODEL: Final = "smollm2-135m"

_THINGS: Final = (
    *("a lighthouse on a rocky island", "the night train through the mountains"),
    *("an old printing press", "a garden behind the library", "the harbour at low tide"),
    *("a workshop that mends clocks", "the first snow of the year", "a market in the rain"),
    *("the observatory on the hill", "a bakery at four in the morning"),
    *("a bridge that is older than the town", "the school at the end of the valley"),
    *("a ferry that runs once a day", "the archive of a small newspaper"),
    *("a weather station in the north", "the orchard after the harvest"),
)
_TASKS: Final = (
    "Describe it to somebody who has never been there, in plain words and short sentences",
    "List what a visitor should look at first, and say in a few words why it matters",
    "Write the opening of a story that takes place there, told by the person who works there",
    "Explain what changes there from spring to winter, and what always stays the same",
    "Write a short letter from a guest who stayed too long and does not want to leave",
    "Say which three questions you would ask the owner, and what you expect to be told",
    "Summarise in two sentences why people come back to it, even though it is far away",
    "Compare it with a place that everybody knows, and name the most important difference",
)
_REST: Final = (
    "Keep to what can be seen and heard; leave out opinions, names and dates. "
    "Do not repeat the question."
)


def messages(number: int) -> list[dict[str, str]]:
    """Return the conversation with this number; all up to 128 · 1,000 differ."""
    thing = _THINGS[number % len(_THINGS)]
    task = _TASKS[number // len(_THINGS) % len(_TASKS)]
    text = f"Visit number {number}. Think of {thing}. {task}. {_REST}"
    return [{"role": "user", "content": text}]


def body(number: int, *, max_tokens: int) -> dict[str, Any]:
    """Return a chat completion's body that yields exactly `max_tokens` tokens."""
    return {
        "model": MODEL,
        "messages": messages(number),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def chat_lines(numbers: Iterable[int], *, max_tokens: int) -> bytes:
    """Return a batch's input with these prompts."""
    return b"".join(
        json.dumps(
            {
                "custom_id": f"prompt-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body(number, max_tokens=max_tokens),
            }
        ).encode()
        + b"\n"
        for number in numbers
    )
