"""64 lines of which one ends vLLM 0.32's CPU engine where prompts are split over steps."""

from typing import Final

from tests.kit.batches import Json, chat

LINES: Final = 64
POISON: Final = 37

MODEL: Final = "tiny"
SPLITTING: Final = ("--enable-chunked-prefill", "--max-num-batched-tokens", "256")
"""Engine arguments with which a prompt of more than 256 tokens is split."""


def lines_with_a_killer() -> list[Json]:
    """All are harmless alone and together but for one: long, seeded, and sampled."""
    lines = []
    for number in range(LINES):
        fields: Json = {"max_tokens": 8, "temperature": number % 2}
        text = f"request {number} waits for the night"
        if number % 16 == 5:
            text = f"w{number} " * 200
        if number == POISON:
            text, fields = f"w{number} " * 400, {**fields, "temperature": 1.0, "seed": 3}
        lines.append(chat(f"r{number}", text, MODEL, **fields))
    return lines
