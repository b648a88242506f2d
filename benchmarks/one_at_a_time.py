"""What a batch gains over sending its requests one at a time to the same engine."""

from collections.abc import Iterator
from statistics import median
from typing import Final

import openai

from benchmarks.engine_full import MAX_TOKENS, client_of, run_batch
from benchmarks.prompts import chat_lines
from benchmarks.report import Row
from benchmarks.workshop import SEATS, Workshop

NAME: Final = "one_at_a_time"

PROMPTS: Final = 80
_ROUNDS: Final = 2
# Llama Stack's request for batch inference: 2,297.87 against 47.65 tokens/s with 80 prompts, on
# four GPUs.
_LLAMA_STACK: Final = 2_297.87 / 47.65


def _one_at_a_time(client: openai.OpenAI) -> float:
    """Return tokens a second where each prompt waits for the one before."""
    tokens, seconds = 0, 0.0
    for number in range(PROMPTS):
        line = chat_lines([number], max_tokens=MAX_TOKENS)
        _, made, took = run_batch(client, line, every_seconds=0.05)
        tokens += made
        seconds += took
    return tokens / seconds


def measure(workshop: Workshop) -> Iterator[Row]:
    """Run 80 prompts as a batch, then each as a batch of one line, then as a batch again."""
    system = workshop.vllm()
    data = chat_lines(range(PROMPTS), max_tokens=MAX_TOKENS)
    batched: list[float] = []
    single = 0.0
    with client_of(system) as client:
        run_batch(client, chat_lines(range(1), max_tokens=1))
        for number in range(_ROUNDS):
            _, tokens, seconds = run_batch(client, data)
            batched.append(tokens / seconds)
            if number == 0:
                single = _one_at_a_time(client)
    workshop.say(f"batched {batched}, one at a time {single:.1f} tokens/s")
    yield Row(
        bench=NAME,
        what=f"{PROMPTS} prompts, tokens/s batched ÷ one at a time",
        value=median(batched) / single,
        detail=f"{', '.join(f'{rate:.0f}' for rate in batched)} against {single:.1f} tokens/s, "
        f"{SEATS} seats; Llama Stack's request reports {_LLAMA_STACK:.1f} on four GPUs "
        "(2,297.87 against 47.65), another model",
    )
