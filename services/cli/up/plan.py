"""What `nightshift up` is asked to run: its options read, checked and turned into a plan. Pure."""

import ipaddress
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

SIMULATED: Final = "simulated"
VLLM: Final = "vllm"
ENGINES: Final = (VLLM, SIMULATED)

_MODEL_NAME: Final = re.compile(r"[^\s,=\x00-\x1f\x7f]{1,200}")


class PlanError(Exception):
    """The options do not fit together; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen; port 0 stands for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return `host:port`, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_exposed(self) -> bool:
        """Tell whether other machines can reach it."""
        return not ipaddress.ip_address(self.host).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """One `--model`: a pool of executors of its own.

    Attributes:
        name: what users ask for.
        path: folder or Hugging Face name; None where the engine needs none.
        engine_args: one string for the engine, unread.
        default_max_tokens: generated for a line that does not say how many; None says nothing.
        gpus: for all its executors together; None leaves them to the even deal.
    """

    name: str
    path: str | None = None
    engine_args: str = ""
    default_max_tokens: int | None = None
    gpus: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorPlan:
    """One executor process.

    Attributes:
        name: `executor-0`, `executor-1`, … over all models.
        model: what it serves.
        gpus: its own; empty is none, None says nothing about them.
    """

    name: str
    model: ModelPlan
    gpus: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that `up` starts."""

    engine: str
    listen: Address
    grpc: Address | None
    models: tuple[ModelPlan, ...]
    executors: tuple[ExecutorPlan, ...] = field(default=())


def parse_address(option: str, text: str) -> Address:
    """Read `HOST:PORT` of an option.

    Raises:
        PlanError: it is no address of a machine.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise PlanError(f"{option} takes HOST:PORT, such as 127.0.0.1:8000; not {text!r}")
    if host == "localhost":
        host = "127.0.0.1"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise PlanError(
            f"{option} takes an IP address, such as 127.0.0.1:{port} or 0.0.0.0:{port}, "
            f"not {host!r}"
        ) from None
    return Address(host, int(port))


def choose_engine(engine: str | None, models: Sequence[str]) -> str:
    """Return the engine: `vllm` where a model is given and nothing else is said.

    Raises:
        PlanError: neither engine nor model is given.
    """
    if engine is not None:
        if engine == VLLM and not models:
            raise PlanError("--engine vllm needs a model: add --model NAME=PATH")
        return engine
    if models:
        return VLLM
    raise PlanError(
        "say what to serve, with one of\n"
        "  nightshift up --model NAME=PATH     a model in vLLM: its folder or Hugging Face name\n"
        "  nightshift up --engine simulated    no model: made-up answers at once, to try it out"
    )


def parse_models(
    engine: str,
    models: Sequence[str],
    engine_args: Sequence[str],
    gpus: Sequence[str],
    default_max_tokens: Sequence[str] = (),
) -> tuple[ModelPlan, ...]:
    """Read `--model` and what is said of each model together.

    Raises:
        PlanError: a name twice or unknown, or a value that cannot be read.
    """
    pairs: dict[str, str | None] = {}
    for text in models or (SIMULATED,):
        name, path = _parse_model(engine, text)
        if name in pairs:
            raise PlanError(f"--model {name} is given twice; each needs a name of its own")
        pairs[name] = path
    args = _by_model("--engine-args", engine_args, pairs)
    devices = _by_model("--gpus", gpus, pairs)
    tokens = _by_model("--default-max-tokens", default_max_tokens, pairs)
    return tuple(
        ModelPlan(
            name=name,
            path=path,
            engine_args=args.get(name, ""),
            default_max_tokens=_parse_tokens(name, tokens[name]) if name in tokens else None,
            gpus=_parse_gpus(name, devices[name]) if name in devices else None,
        )
        for name, path in pairs.items()
    )


def _parse_model(engine: str, text: str) -> tuple[str, str | None]:
    name, equals, path = text.partition("=")
    if equals and not path:
        raise PlanError(f"--model {text}: nothing follows the '='; it takes NAME=PATH")
    if not equals and engine != SIMULATED:
        if looks_like_path(text):
            raise PlanError(f"--model takes NAME=PATH: give it a name, as --model my-model={text}")
        path = name
    if not _MODEL_NAME.fullmatch(name):
        raise PlanError(f"--model {text!r}: a name is 1 to 200 characters, no blanks, ',' or '='")
    if "," in path:
        raise PlanError(f"--model {name}: a path with a comma cannot be passed on; link or move it")
    return name, path or None


def looks_like_path(text: str) -> bool:
    """Tell a file path from a Hugging Face name, which has one slash at most."""
    return text.startswith(("/", "./", "../", "~")) or text in (".", "..") or text.count("/") > 1


def _by_model(option: str, values: Sequence[str], names: dict[str, str | None]) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in values:
        # A name may hold a colon itself, so the longest known one wins.
        fits = [name for name in names if re.match(re.escape(name) + r"\s*:", value)]
        if not fits:
            known = ", ".join(names)
            raise PlanError(f"{option} takes 'NAME: …' with NAME one of {known}; not {value!r}")
        name = max(fits, key=len)
        if name in found:
            raise PlanError(f"{option} for {name} is given twice; put all in one")
        found[name] = value[len(name) :].lstrip()[1:].strip()
        try:
            shlex.split(found[name])
        except ValueError as error:
            raise PlanError(f"{option} {value!r}: {str(error).lower()}") from error
    return found


def _parse_tokens(name: str, text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise PlanError(
            f"--default-max-tokens takes 'NAME: 512', a whole number; not '{name}: {text}'"
        )
    return int(text)


def _parse_gpus(name: str, text: str) -> tuple[str, ...]:
    gpus = tuple(part.strip() for part in text.split(","))
    if not all(gpus) or len(set(gpus)) != len(gpus):
        raise PlanError(f"--gpus takes 'NAME: 0,1', each once; not '{name}: {text}'")
    return gpus


def deal_executors(
    models: Sequence[ModelPlan], executors: int, visible: Sequence[str]
) -> tuple[ExecutorPlan, ...]:
    """Give each model its executors, and each executor its GPUs.

    Args:
        models: in the order of the command line.
        executors: how many each model gets.
        visible: GPUs of this machine that are to be dealt, in order; empty without any.

    Raises:
        PlanError: they do not divide evenly, or a named one is not there.
    """
    named = {gpu for model in models for gpu in model.gpus or ()}
    missing = sorted(named - set(visible))
    if missing:
        there = ", ".join(visible) or "none"
        raise PlanError(f"--gpus: no GPU {', '.join(missing)} here; visible are: {there}")
    rest = [gpu for gpu in visible if gpu not in named]
    takers = executors * sum(1 for model in models if model.gpus is None)
    if visible and takers and (len(rest) < takers or len(rest) % takers):
        raise PlanError(
            f"{len(rest)} GPU(s) cannot be dealt evenly to {takers} executor(s): change "
            f"--executors (now {executors} for each model), or say who gets which with "
            f"--gpus '{next(m.name for m in models if m.gpus is None)}: {','.join(visible)}'"
        )
    share = len(rest) // takers if takers else 0
    plans: list[ExecutorPlan] = []
    dealt = 0
    for model in models:
        own = model.gpus
        if own is not None and (len(own) < executors or len(own) % executors):
            raise PlanError(
                f"--gpus '{model.name}: {','.join(own)}': {len(own)} GPU(s) cannot be dealt "
                f"evenly to {executors} executor(s); change one of the two"
            )
        for number in range(executors):
            if own is not None:
                each = len(own) // executors
                gpus: tuple[str, ...] | None = own[number * each : (number + 1) * each]
            elif visible:
                gpus = tuple(rest[dealt : dealt + share])
                dealt += share
            else:
                gpus = None
            plans.append(ExecutorPlan(name=f"executor-{len(plans)}", model=model, gpus=gpus))
    return tuple(plans)
