"""What each child of `nightshift up` gets of our environment."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import services
from services.cli.shared.datadir import OWNER_VARIABLE

_EXECUTOR: Final = ("executor",)
_STORE: Final = ("store",)
_OWNED: Final[Mapping[str, tuple[str, ...]]] = {
    "AWS_": _STORE,
    "PG": _STORE,
    "NIGHTSHIFT_STORE_": _STORE,
    "NIGHTSHIFT_SCHEDULER_": ("scheduler",),
    "NIGHTSHIFT_GATEWAY_": ("gateway",),
    "NIGHTSHIFT_EXECUTOR_": _EXECUTOR,
    "NIGHTSHIFT_NATS_": ("store", "scheduler", "executor"),
    "NIGHTSHIFT_SECRET_FILE": ("store", "scheduler", "gateway", "executor"),
    # The command line's.
    "NIGHTSHIFT_API_KEY": (),
    "OPENAI_": (),
    "CUDA_": _EXECUTOR,
    "HF_": _EXECUTOR,
    "HUGGING": _EXECUTOR,
    "NCCL_": _EXECUTOR,
    "NVIDIA_": _EXECUTOR,
    "TORCH": _EXECUTOR,
    "TRANSFORMERS_": _EXECUTOR,
    "VLLM_": _EXECUTOR,
}
"""Beginnings of variables that only children of these kinds get; all others are everybody's."""
_NEEDED_BY_NATS: Final = (
    *("PATH", "HOME", "LANG", "TMPDIR", "TZ"),
    *("GODEBUG", "GOMAXPROCS", "GOMEMLIMIT"),
    OWNER_VARIABLE,
)


def environment_of(kind: str, ours: Mapping[str, str]) -> dict[str, str]:
    """Return what a child of a kind needs of our environment, and nothing that is another's.

    An engine, and the code that a model brings, is to see no credentials of the store.
    """
    if kind == "nats":
        return {name: ours[name] for name in _NEEDED_BY_NATS if name in ours}
    return {
        name: value
        for name, value in ours.items()
        if all(kind in kinds or not name.startswith(prefix) for prefix, kinds in _OWNED.items())
    }


def import_path(environment: Mapping[str, str]) -> str:
    """Return PYTHONPATH with our own code first, so that `-P` children find it from anywhere."""
    root = str(Path(services.__path__[0]).parent)
    rest = environment.get("PYTHONPATH")
    return f"{root}{os.pathsep}{rest}" if rest else root
