"""The fields of a body that reach an engine, by endpoint: a list of what is good.

All else is dropped. What is dropped and would have changed the answer is refused by name instead.
docs/compatibility.md lists both.
"""

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

_SAMPLED: Final = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "top_k",
        "top_p",
    }
)
_GENERATED: Final = _SAMPLED | {
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "echo",
    "length_penalty",
    "logprob_token_ids",
    "logprobs",
    "max_tokens",
    "min_tokens",
    "n",
    "prompt_logprobs",
    "repetition_detection",
    "response_format",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "spaces_between_special_tokens",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "truncation_side",
    "use_beam_search",
}
_TEMPLATED: Final = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template_kwargs",
        "continue_final_message",
        "messages",
    }
)
_POOLED: Final = frozenset({"padding", "truncate_prompt_tokens", "truncation_side"}) | {
    "use_activation"
}
_SCORED: Final = _POOLED | {
    "chat_template_kwargs",
    "documents",
    "instruction",
    "max_tokens_per_doc",
    "max_tokens_per_query",
}

ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    CHAT_COMPLETIONS: _GENERATED
    | _TEMPLATED
    | {
        "documents",
        "include_reasoning",
        "max_completion_tokens",
        "parallel_tool_calls",
        "reasoning_effort",
        "tool_choice",
        "tools",
        "top_logprobs",
    },
    COMPLETIONS: _GENERATED | {"max_completion_tokens", "prompt", "suffix"},
    RESPONSES: _SAMPLED
    | {
        "chat_template_kwargs",
        "include",
        "include_reasoning",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "parallel_tool_calls",
        "reasoning",
        "service_tier",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncation",
    },
    EMBEDDINGS: _POOLED
    | _TEMPLATED
    | {"dimensions", "embed_dtype", "encoding_format", "endianness", "input"},
    SCORE: _SCORED | {"data_1", "data_2", "items", "queries", "text_1", "text_2"},
    RERANK: _SCORED | {"query", "top_n"},
}
"""By endpoint, what is passed on. `model`, `request_id` and `cache_salt` are ours to set."""

REFUSED: Final = frozenset(
    {
        "audio",
        "chat_template",
        "enable_response_messages",
        "function_call",
        "functions",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "logits_processors",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "previous_input_messages",
        "prompt_embeds",
        "return_mm_kwargs",
        "return_prompt_text",
        "return_token_offsets",
        "routed_experts_prompt_start",
        "vllm_xargs",
        "watermarking",
        "web_search_options",
    }
)
"""Would change the answer and are not passed on at any endpoint; empty values ask for nothing."""

_KEPT: Final = ("conversation", "previous_response_id", "prompt")
"""Name what OpenAI keeps of responses; nothing is kept here."""


def refused_field(endpoint: str, body: Mapping[str, Any]) -> str | None:
    """The first field that is not passed on and would have changed the answer; None if none."""
    allowed = ALLOWED.get(endpoint, frozenset())
    for name, value in body.items():
        if name in allowed or not value:
            continue
        if name in REFUSED:
            return name
        if name in _KEPT and endpoint == RESPONSES:
            return name
        if name == "modalities" and value != ["text"]:
            return name
        if name == "best_of" and value != (body.get("n") or 1):
            return name
    return None
