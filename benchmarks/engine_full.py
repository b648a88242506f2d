"""Tokens a second of a batch through the whole system ÷ vLLM's offline `LLM`, in pairs."""

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, Final

import openai

from benchmarks.prompts import chat_lines, messages
from benchmarks.report import Row, at_least
from benchmarks.system import CHAT, System
from benchmarks.workshop import MAX_MODEL_LEN, SEATS, Workshop

NAME: Final = "engine_full"

LINES: Final = 256
MAX_TOKENS: Final = 32
PAIRS: Final = 5
GOAL: Final = 0.90
BUDGET: Final = 0.97
# A poll takes about 5 ms of CPU that the engine wants: rare ones, against runs of half a minute.
_POLL_SECONDS: Final = 0.2


class Offline:
    """vLLM's `LLM` with the executor's engine arguments, its processes our children."""

    def __init__(self, folder: str) -> None:
        """Load it; usually 20 s."""
        # What the executor sets too (services/executor/engines/vllm/api.py), before the import.
        for name, value in {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TORCH_COMPILE_DISABLE": "1",
        }.items():
            os.environ.setdefault(name, value)
        with _stdout_to_stderr():
            from vllm import LLM, SamplingParams

            self._llm: Any = LLM(
                model=folder,
                max_num_seqs=SEATS,
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=4096,
                enforce_eager=True,
                enable_prefix_caching=False,
                enable_chunked_prefill=False,
            )
        self._params: Any = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)

    def run(self, lines: int = LINES) -> tuple[int, int, float]:
        """Return prompt tokens, tokens made, and seconds of all prompts at once."""
        conversations = [messages(number) for number in range(lines)]
        began = time.monotonic()
        found = self._llm.chat(conversations, self._params, use_tqdm=False)
        seconds = time.monotonic() - began
        prompts = sum(len(one.prompt_token_ids) for one in found)
        return prompts, sum(len(one.outputs[0].token_ids) for one in found), seconds


def run_batch(
    client: openai.OpenAI, data: bytes, every_seconds: float = _POLL_SECONDS
) -> tuple[int, int, float]:
    """Return prompt tokens, tokens made, and seconds from create to completed, upload left out.

    As the official client sees it. AssertionError where a line failed.
    """
    file = client.files.create(file=("input.jsonl", io.BytesIO(data)), purpose="batch")
    began = time.monotonic()
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(every_seconds)
        batch = client.batches.retrieve(batch.id)
    seconds = time.monotonic() - began
    counts, usage = batch.request_counts, batch.usage
    assert batch.status == "completed", batch
    assert counts is not None, batch
    assert counts.completed == counts.total, batch
    assert usage is not None, batch
    return usage.input_tokens, usage.output_tokens, seconds


def client_of(system: System) -> openai.OpenAI:
    """Return the official client."""
    return openai.OpenAI(base_url=system.up.base_url, api_key="none", timeout=60)


def measure(workshop: Workshop) -> Iterator[Row]:
    """Keep both engines loaded and run them in turn, the first of each pair alternating."""
    system = workshop.vllm()
    workshop.say("loading the offline engine; usually 20 s")
    offline = Offline(str(workshop.model_folder()))
    offline.run(SEATS)
    data = chat_lines(range(LINES), max_tokens=MAX_TOKENS)
    pairs: list[tuple[float, float]] = []
    prompt_tokens = 0
    with client_of(system) as client:
        for number in range(PAIRS):
            rates = {}
            for side in ("offline", "system") if number % 2 == 0 else ("system", "offline"):
                found = offline.run() if side == "offline" else run_batch(client, data)
                prompts, tokens, seconds = found
                assert tokens == LINES * MAX_TOKENS, f"{side} made {tokens} tokens"
                assert prompt_tokens in (0, prompts), "the sides did not read the same prompts"
                prompt_tokens, rates[side] = prompts, tokens / seconds
            pairs.append((rates["system"], rates["offline"]))
            workshop.say(
                f"pair {number + 1}: system {rates['system']:.1f}, offline "
                f"{rates['offline']:.1f} tokens/s, ratio {rates['system'] / rates['offline']:.3f}"
            )
    del offline
    yield at_least(
        NAME,
        f"{LINES} lines, tokens/s through the system ÷ offline `LLM`, median of {PAIRS} pairs",
        median(system_rate / offline_rate for system_rate, offline_rate in pairs),
        BUDGET,
        also=f"goal here {GOAL:.2f}",
        detail="; ".join(f"{a:.0f}/{b:.0f} = {a / b:.3f}" for a, b in pairs)
        + f"; {prompt_tokens / LINES:.0f} tokens in, {MAX_TOKENS} out, {SEATS} seats",
    )
    yield Row(
        bench=NAME,
        what="tokens/s through the system, median",
        value=median(system_rate for system_rate, _ in pairs),
        unit="tokens/s",
        detail=f"offline {median(rate for _, rate in pairs):.0f}",
    )


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keep vLLM's prints, and those of its processes, out of the table."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
