"""Models for tests with a real engine, each made once a session."""

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.tiny_model import make_tiny_model


@pytest.fixture(scope="module", autouse=True)
def no_echo_of_engines() -> Iterator[None]:
    """Collect what engines in this process left, while nobody minds that vLLM leaves sockets open.

    Else the collector comes upon it in a later module, where every warning is an error.
    """
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random-weight model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def small_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; converted where it is not there yet (15 to 30 s).

    In a process of its own, since what it imports warns.
    """
    command = [sys.executable, "-m", "services.executor.small_model"]
    made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return Path(made.stdout.splitlines()[-1])
